"""Streamed decoding against the host's own decode of everything, on tiny random Wan VAEs."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType
from typing import Any

import pytest
import torch

from fastar_pack.fastar_core.errors import FastARError, GeometryError, UnsupportedError
from host.stream_parts import tiny_wan_vae
from tests_support import Host

pytestmark = pytest.mark.cpu
ROWS, COLUMNS = 2, 3


@pytest.fixture(scope="module")
def decode(host: Host) -> ModuleType:
    return importlib.import_module("fastar_pack.nodes.host.decode")


@pytest.fixture(scope="module")
def probes(host: Host) -> ModuleType:
    return importlib.import_module("fastar_pack.nodes.host.vae_probe")


@pytest.fixture(scope="module")
def vae(host: Host) -> Any:
    """A random VAE whose pictures lie well inside 0..1, so that clamping hides nothing."""
    made = tiny_wan_vae()
    with torch.no_grad():
        spread = made.first_stage_model.decode(noise(4)).std()
        for part in (made.first_stage_model.decoder.head[2].weight, made.first_stage_model.decoder.head[2].bias):
            part.mul_(0.3 / spread)
    return made


def noise(frames: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, 16, frames, ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def whole(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    return vae.decode(latents).float()


def stream(decoder: Any, latents: torch.Tensor, chunks: list[int]) -> tuple[torch.Tensor, list[int]]:
    """All frames, and how many each push gave (the flush last)."""
    parts = [decoder.push(part) for part in torch.split(latents, chunks, 2)]
    parts.append(decoder.flush())
    return torch.cat(parts, 1), [part.shape[1] for part in parts]


@pytest.mark.parametrize(
    "chunks", [[1, 3, 3, 3], [3, 3, 3, 1], [1] * 9, [4, 4, 2], [10], [5, 1, 1, 1, 1], [1, 1], [1], [2], [1, 2]], ids=str
)
@pytest.mark.parametrize("least", [0, 2])
def test_every_chunking_equals_the_stock_decode(
    decode: ModuleType, probes: ModuleType, vae: Any, chunks: list[int], least: int
) -> None:
    latents = noise(sum(chunks), batch=2 if chunks == [1, 3, 3, 3] else 1)
    decoder = decode.StreamDecoder(vae, least=least or probes.probe(vae, 3).least)
    frames, _ = stream(decoder, latents, chunks)
    full = whole(vae, latents)
    assert frames.shape == full.shape
    assert frames.shape[1] == 1 + 4 * (sum(chunks) - 1) == decoder.frames_out
    assert (frames - full).abs().max() <= 1e-6
    assert full.std() > 0.05  # the picture is not flat or clamped away


def test_frames_come_as_early_as_the_rule_allows(decode: ModuleType, vae: Any) -> None:
    assert stream(decode.StreamDecoder(vae, least=2), noise(9), [3, 3, 3])[1] == [9, 12, 12, 0]
    assert stream(decode.StreamDecoder(vae, least=2), noise(6), [1] * 6)[1] == [1, 0, 8, 0, 8, 0, 4]


@pytest.mark.parametrize(
    ("count", "started", "least", "last", "sizes"),
    [
        (3, False, 2, False, [1, 2]),
        (3, True, 2, False, [3]),
        (1, True, 2, False, []),
        (1, True, 2, True, [1]),
        (9, True, 2, False, [2, 2, 2, 3]),
        (4, False, 1, False, [1, 1, 1, 1]),
        (2, False, 2, False, [1]),
        (0, True, 2, True, []),
    ],
)
def test_call_sizes(decode: ModuleType, count: int, started: bool, least: int, last: bool, sizes: list[int]) -> None:
    assert decode.call_sizes(count, started, least, last) == sizes


def calls(vae: Any, latents: torch.Tensor, sizes: list[int], fresh: bool = False) -> torch.Tensor:
    """Decoder calls by hand, as a careless streamer would make them."""
    import comfy.ldm.wan.vae as wan

    model = vae.first_stage_model
    slots = sum(isinstance(module, wan.CausalConv3d) for module in model.decoder.modules())
    state: list[Any] = [None] * slots
    frames = []
    with torch.no_grad():
        for part in torch.split(latents, sizes, 2):
            state = [None] * slots if fresh else state
            out = model.decoder(model.conv2(part.to(vae.vae_dtype)), feat_cache=state, feat_idx=[0])
            frames.append(torch.cat(out, 2) if isinstance(out, list) else out)
    return vae.process_output(torch.cat(frames, 2).float()).movedim(1, -1)


def test_wrong_ways_to_stream_are_seen(decode: ModuleType, probes: ModuleType, vae: Any) -> None:
    latents = noise(9)
    full = whole(vae, latents)
    assert torch.allclose(calls(vae, latents, [1, 2, 3, 3]), full, atol=1e-6)  # the helper itself is right
    fresh = calls(vae, latents, [1, 2, 3, 3], fresh=True)
    assert fresh.shape != full.shape or (fresh - full).abs().max() > 0.05
    assert calls(vae, latents, [3, 3, 3]).shape[1] < 33  # a first call of three latents loses frames
    one_by_one = (calls(vae, latents, [1] * 9) - full).abs().max()
    # 0.3.75 completes its state itself, 0.27 does not: the probe must tell them apart
    assert probes.probe(vae, 3).least == (1 if one_by_one <= 1e-6 else 2)
    assert one_by_one <= 1e-6 or one_by_one > 0.05


def test_the_probe_falls_back_when_the_host_streams_differently(
    probes: ModuleType, vae: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = probes.probe(vae, 3)
    assert (found.kind, found.error <= 1e-6) == ("wan", True)
    assert found.state_bytes > 0
    plain = type(vae.first_stage_model.decoder).forward

    def forgetful(self: Any, x: Any, feat_cache: Any = None, feat_idx: Any = (0,)) -> Any:
        out = plain(self, x, feat_cache=feat_cache, feat_idx=feat_idx)
        feat_cache[0] = torch.zeros_like(feat_cache[0])
        return out

    wanted = whole(vae, noise(4))
    decoder, stock = vae.first_stage_model.decoder, vae.decode

    def stock_decode(latents: torch.Tensor) -> torch.Tensor:
        """The stock decode as it is; whoever calls the decoder by himself afterwards meets a changed one."""
        monkeypatch.setattr(type(decoder), "forward", plain)
        frames = stock(latents)
        monkeypatch.setattr(type(decoder), "forward", forgetful)
        return frames

    monkeypatch.setattr(vae, "decode", stock_decode)
    with caplog.at_level(logging.WARNING):
        found = probes.probe(vae, 2)
    assert found.kind == "whole"
    assert "stock decode" in caplog.text
    monkeypatch.setattr(type(decoder), "forward", plain)
    frames, given = stream(probes.choose_decoder(vae, found), noise(4), [2, 2])
    assert torch.equal(frames, wanted)
    assert given == [0, 0, 13]


def test_the_users_vae_is_not_touched(decode: ModuleType, vae: Any) -> None:
    before = set(vae.__dict__), set(vae.first_stage_model.__dict__), {k: id(v) for k, v in vae.__dict__.items()}
    weights = {k: v.clone() for k, v in vae.first_stage_model.state_dict().items()}
    stream(decode.StreamDecoder(vae), noise(6), [3, 3])
    after = set(vae.__dict__), set(vae.first_stage_model.__dict__), {k: id(v) for k, v in vae.__dict__.items()}
    assert after == before
    assert all(torch.equal(v, weights[k]) for k, v in vae.first_stage_model.state_dict().items())


def test_state_between_blocks_is_small_and_gone_at_the_end(decode: ModuleType, probes: ModuleType, vae: Any) -> None:
    decoder = decode.StreamDecoder(vae)
    sizes = []
    for _ in range(3):
        decoder.push(noise(3))
        sizes.append(decoder.state_bytes())
    assert sizes[0] <= sizes[1] == sizes[2] > 0
    planned = probes.decoder_bytes(vae, probes.probe(vae, 3), 1, 3, ROWS, COLUMNS)
    assert sizes[2] < planned
    assert probes.probe(vae, 3).state_bytes * ROWS * COLUMNS == pytest.approx(sizes[2], rel=0.01)
    decoder.flush()
    assert decoder.state_bytes() == 0


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_failure_inside_a_block_drops_the_state(
    decode: ModuleType, vae: Any, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    decoder = decode.StreamDecoder(vae)
    decoder.push(noise(3))
    monkeypatch.setattr(vae, "process_output", lambda image: (_ for _ in ()).throw(failure("stop")))
    with pytest.raises(failure, match="stop"):
        decoder.push(noise(3))
    assert decoder.state_bytes() == 0
    with pytest.raises(FastARError, match="closed"):
        decoder.push(noise(3))


def test_out_of_memory_goes_on_in_tiles(
    decode: ModuleType, vae: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from comfy import model_management

    freed: list[Any] = []
    monkeypatch.setattr(model_management, "free_memory", lambda *given, **_: freed.append(given))
    latents = noise(9)
    decoder = decode.StreamDecoder(vae)
    first = decoder.push(latents[:, :, :3])
    plain = type(vae.first_stage_model.decoder).forward
    limit = [1]

    def full_card(self: Any, x: Any, *given: Any, **named: Any) -> Any:
        if limit and limit.pop():
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return plain(self, x, *given, **named)

    monkeypatch.setattr(type(vae.first_stage_model.decoder), "forward", full_card)
    with caplog.at_level(logging.WARNING):
        rest = [decoder.push(latents[:, :, 3:6]), decoder.push(latents[:, :, 6:]), decoder.flush()]
    frames = torch.cat([first, *rest], 1)
    assert "tiles" in caplog.text
    assert freed
    assert [part.shape[1] for part in rest] == [12, 12, 0]
    assert frames.shape == whole(vae, latents).shape
    # one tile covers this small picture, and the run-up covers all latents before: the frames are the exact ones
    assert (frames - whole(vae, latents)).abs().max() <= 1e-4


class FrameCodec:
    """A VAE object whose latent frames are independent: four shades per latent frame, the first gives one."""

    latent_channels, latent_dim, output_channels = 16, 3, 3

    class first_stage_model:  # noqa: N801 - the name the host gives it
        frames_independent = True

    def spacial_compression_decode(self) -> int:
        return 8

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        shades = latents.mean((1, 3, 4)).repeat_interleave(4, 1)[:, 3:] + torch.arange(3, 3 + 4 * latents.shape[2] - 3) % 4
        return shades[..., None, None, None].expand(-1, -1, latents.shape[3] * 8, latents.shape[4] * 8, 3)


@pytest.mark.parametrize("chunks", [[3, 3, 1], [1] * 7, [7]], ids=str)
def test_independent_frames(decode: ModuleType, chunks: list[int]) -> None:
    codec, latents = FrameCodec(), noise(7, batch=2)
    frames, given = stream(decode.StreamDecoder(codec), latents, chunks)
    assert torch.equal(frames, codec.decode(latents).float())
    assert given == [4 * n - 3 * (i == 0) for i, n in enumerate(chunks)] + [0]
    # without the leading latent each block loses three frames
    assert sum(codec.decode(part).shape[1] for part in torch.split(latents, chunks, 2)) == 28 - 3 * len(chunks)


def test_shapes_and_wrong_vaes_are_refused_in_words(decode: ModuleType, vae: Any) -> None:
    decoder = decode.StreamDecoder(vae)
    decoder.push(noise(3))
    with pytest.raises(GeometryError, match="expected"):
        decoder.push(noise(3, batch=2))
    with pytest.raises(GeometryError, match="expected"):
        decode.StreamDecoder(vae).push(noise(1)[:, :, 0])
    decode.check_vae(vae)

    class ImageVae:
        first_stage_model, latent_channels, latent_dim = object(), 4, 2

    with pytest.raises(UnsupportedError, match="4-channel image latents.*16-channel video"):
        decode.check_vae(ImageVae())
    with pytest.raises(UnsupportedError, match="no VAE"):
        decode.check_vae(None)
