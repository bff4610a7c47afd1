"""cfg, batch, prompts over time and start frames of the streaming sampler node, on the real host."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from host.stream_parts import HEIGHT, WIDTH, CountingCalls, sample, text, tiny_model, tiny_wan_vae
from tests_support import Host

pytestmark = pytest.mark.cpu
Parts = tuple[Any, Any]


@pytest.fixture
def parts(host: Host) -> tuple[Any, Any]:
    return tiny_model(), tiny_wan_vae()


def start(frames: int, rows: int = 1, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 16, frames, HEIGHT // 8, WIDTH // 8, generator=generator)


def test_cfg_is_the_same_in_one_call_and_in_two(host: Host, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CountingCalls(monkeypatch)
    together = sample(host, *parts, cfg=3.0, negative=text(2))[0]
    assert set(calls.batches) == {2}
    calls.batches.clear()
    monkeypatch.setattr("comfy.samplers.can_concat_cond", lambda first, second: first is second)
    apart = sample(host, *parts, cfg=3.0, negative=text(2))[0]
    assert set(calls.batches) == {1}
    assert len(calls.batches) == 18
    assert (together - apart).abs().max() < 1e-4  # values reach 10
    assert (together - sample(host, *parts)[0]).abs().max() > 1e-2


def test_cfg_one_makes_no_negative_call(host: Host, parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CountingCalls(monkeypatch)
    with_negative = sample(host, *parts, negative=text(2))
    assert set(calls.batches) == {1}
    assert len(calls.batches) == 9
    assert json.loads(with_negative[3])["counts"]["branches"] == 1
    assert torch.equal(with_negative[0], sample(host, *parts)[0])


def test_a_batch_is_its_rows_one_by_one(host: Host, parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from fastar_pack.nodes.host import stream_job

    both, images, videos, _ = sample(host, *parts, batch_size=2)
    assert (both.shape[0], images.shape[0], len(videos)) == (2, 42, 2)
    plain_request = stream_job.StreamRequest
    for row in range(2):
        monkeypatch.setattr(stream_job, "StreamRequest",
                            lambda *args, _row=row, **kw: _one_row(plain_request(*args, **kw), _row))
        single, pictures, _, _ = sample(host, *parts)
        assert (both[row] - single[0]).abs().max() < 1e-5
        assert (both[1 - row] - single[0]).abs().max() > 1e-2
        assert (videos[row].get_components().images - pictures).abs().max() < 1e-4


def _one_row(request: Any, row: int) -> Any:
    """The same run with the noise and the later draws of one row of a batch of two."""
    from fastar_pack.fastar_core.noise import SeededRenoise, seeded_normal

    whole = SeededRenoise(request.seed)
    request.noise = seeded_normal(request.seed, (2, *request.noise.shape[1:]))[row:row + 1]
    request.renoise = lambda block, step, like: whole(block, step, like.expand(2, *like.shape[1:]))[row:row + 1]
    return request


def test_batch_rows_get_files_of_their_own(host: Host, parts: tuple[Any, Any]) -> None:
    _, images, videos, text_report = sample(host, *parts, batch_size=2, frames_to="file", filename_prefix="rows")
    files = json.loads(text_report)["files"]
    assert [file["frames"] for file in files] == [21, 21]
    assert len({file["path"] for file in files}) == 2
    assert images.shape[0] == 2 * 12
    assert [len(video.get_components().images) for video in videos] == [21, 21]


def test_a_prompt_switch_acts_at_the_block_border(host: Host, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = text(1), text(8, rows=11)
    alone = sample(host, *parts, positive=first, length=33)[0]
    calls = CountingCalls(monkeypatch)
    switched, _, _, text_report = sample(host, *parts, positive=first, length=33, prompts=[(0, first), (4, second)])
    rows = [used.shape[1] for used in calls.texts]
    assert rows == [7] * 5 + [7] * 5 + [11] * 4  # latent frame 4 lies in the block 3..5: the switch comes at 6
    assert torch.equal(switched[:, :, :6], alone[:, :, :6])
    assert (switched[:, :, 6:] - alone[:, :, 6:]).abs().max() > 1e-2
    assert json.loads(text_report)["counts"]["branches"] == 1
    exact = sample(host, *parts, positive=first, length=33, prompts=[(0, first), (6, second)])[0]
    assert torch.equal(exact, switched)
    early = sample(host, *parts, positive=first, length=33, prompts=[(0, first), (3, second)])[0]
    assert not torch.equal(early[:, :, 3:6], alone[:, :, 3:6])


def test_start_latents_stay_and_steer(host: Host, parts: tuple[Any, Any]) -> None:
    given = start(3)
    latent, images, _, text_report = sample(host, *parts, start_latent={"samples": given})
    assert torch.equal(latent[:, :, :3], given)
    assert images.shape[0] == 21
    assert json.loads(text_report)["counts"]["model_calls"] == {"prefill": 1, "denoise": 4}
    other = sample(host, *parts, start_latent={"samples": start(3, seed=4)})[0]
    assert (latent[:, :, 3:] - other[:, :, 3:]).abs().max() > 1e-2


def test_start_latents_of_a_run_continue_it(host: Host, parts: tuple[Any, Any]) -> None:
    whole = sample(host, *parts)[0]
    again = sample(host, *parts, start_latent={"samples": whole[:, :, :3]})[0]
    assert torch.equal(again[:, :, :3], whole[:, :, :3])
    # the same noise and the same clean history; only the renoise draws count blocks from 0 again
    assert (again[:, :, 3:] - whole[:, :, 3:]).abs().max() > 0


def test_batch_takes_start_rows(host: Host, parts: tuple[Any, Any]) -> None:
    rows = {"samples": start(1, rows=2)}
    two = sample(host, *parts, start_latent=rows, preset="causal_forcing_framewise_4step", length=9)[0]
    assert two.shape[0] == 2
    repeated = sample(host, *parts, start_latent={"samples": start(1)}, batch_size=2, preset="demo", length=9)[0]
    assert torch.equal(repeated[0, :, :1], repeated[1, :, :1])
    assert not torch.equal(repeated[0, :, 1:], repeated[1, :, 1:])


def test_a_start_image_is_fitted_encoded_and_kept(host: Host, parts: tuple[Any, Any]) -> None:
    image = torch.rand(1, 50, 90, 3, generator=torch.Generator().manual_seed(0))
    latent = sample(host, *parts, start_image=image, preset="demo")[0]
    import comfy.utils

    fitted = comfy.utils.common_upscale(image.movedim(-1, 1), WIDTH, HEIGHT, "bilinear", "center").movedim(1, -1)
    with torch.no_grad():
        assert torch.equal(latent[:, :, :1], parts[1].encode(fitted))


def test_the_latent_of_stock_image_to_video_is_honoured(host: Host, parts: tuple[Any, Any]) -> None:
    model = parts[0].clone()
    given = start(1)
    model.model_options["transformer_options"]["ar_config"] = {"initial_latent": given}
    latent = sample(host, model, parts[1], preset="demo")[0]
    assert torch.equal(latent, sample(host, *parts, start_latent={"samples": given}, preset="demo")[0])
    own = sample(host, model, parts[1], start_latent={"samples": start(1, seed=9)}, preset="demo")[0]
    assert torch.equal(own[:, :, :1], start(1, seed=9))


def test_noise_under_the_start_frames_follows_the_family(host: Host, parts: tuple[Any, Any]) -> None:
    from fastar_pack.fastar_core.noise import seeded_normal
    from fastar_pack.fastar_core.presets import get_preset
    from fastar_pack.fastar_core.stream_choice import draw_noise

    shape = (1, 16, 4, 4, 6)
    whole = seeded_normal(7, shape)
    assert torch.equal(draw_noise(7, shape, 1, get_preset("self_forcing")), whole)
    causal = draw_noise(7, shape, 1, get_preset("causal_forcing_framewise_4step"))
    assert torch.equal(causal[:, :, 1:], seeded_normal(7, (1, 16, 3, 4, 6)))
    assert not torch.equal(causal[:, :, 1:], whole[:, :, 1:])
    assert torch.equal(draw_noise(7, shape, 0, get_preset("causal_forcing_framewise_4step")), whole)
