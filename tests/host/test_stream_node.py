"""The streaming sampler node from end to end on the real host: results, frame counts, outputs, report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from host.stream_parts import DEFAULTS, HEIGHT, LENGTH, WIDTH, CountingCalls, sample, text, tiny_model, tiny_wan_vae
from tests_support import Host

pytestmark = pytest.mark.cpu


@pytest.fixture
def parts(host: Host) -> tuple[Any, Any]:
    return tiny_model(), tiny_wan_vae()


def read_video(path: str | Path) -> torch.Tensor:
    """Frames [F, H, W, 3] in 0..1 of a video file."""
    from comfy_api.latest._input_impl import VideoFromFile

    return VideoFromFile(str(path)).get_components().images


def test_everything_comes_out(host: Host, parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CountingCalls(monkeypatch)
    latent, images, videos, text_report = sample(host, *parts)
    assert latent.shape == (1, 16, 6, HEIGHT // 8, WIDTH // 8)
    assert latent.device.type == "cpu"
    assert images.shape == (LENGTH, HEIGHT, WIDTH, 3)
    assert 0 <= float(images.min()) < float(images.max()) <= 1
    assert torch.equal(videos[0].get_components().images, images)
    assert float(videos[0].get_components().frame_rate) == 16
    report = json.loads(text_report)
    assert report["counts"]["model_calls"] == {"denoise": 8, "clean": 1}
    assert len(calls.batches) == 9  # 2 blocks of 4 steps, one clean pass between them
    assert report["counts"]["attention_calls"] == 9 * 2
    assert report["seconds"]["total"] >= report["seconds"]["sampling"] + report["seconds"]["vae"] - 0.01
    assert report["frames"] == {"latent": 6, "computed": 21, "delivered": 21, "to": "memory"}


def test_pictures_are_those_of_the_stock_decode(host: Host, parts: tuple[Any, Any]) -> None:
    model, vae = parts
    latent, images, _, _ = sample(host, model, vae)
    with torch.no_grad():
        stock = vae.decode(latent)
    assert (images - stock.flatten(0, 1)).abs().max() < 1e-5
    assert (images - stock.flatten(0, 1).roll(1, 0)).abs().max() > 1e-3


def test_same_seed_same_bytes_and_the_global_generator_is_left_alone(host: Host, parts: tuple[Any, Any]) -> None:
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = sample(host, *parts)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(9)
    second = sample(host, *parts)
    other = sample(host, *parts, seed=6)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize(("length", "latents", "computed"), [
    (1, 1, 1), (2, 2, 5), (4, 2, 5), (5, 2, 5), (6, 3, 9), (20, 6, 21),
])
def test_surplus_is_cut(host: Host, parts: tuple[Any, Any], length: int, latents: int, computed: int) -> None:
    latent, images, videos, text_report = sample(host, *parts, length=length)
    assert (latent.shape[2], images.shape[0]) == (latents, length)
    assert len(videos[0].get_components().images) == length
    frames = json.loads(text_report)["frames"]
    assert (frames["latent"], frames["computed"], frames["delivered"]) == (latents, computed, length)
    whole, pictures, _, _ = sample(host, *parts, length=computed)
    assert torch.equal(latent, whole)
    assert torch.equal(images, pictures[:length])


def test_a_file_holds_the_same_frames(host: Host, parts: tuple[Any, Any]) -> None:
    _, pictures, _, _ = sample(host, *parts, length=18)
    node = host.nodes["FastARStreamingSampler"]()
    given = {**DEFAULTS, "positive": text(1), "length": 18, "frames_to": "file", "prompt": {"1": {"class_type": "x"}},
             "extra_pnginfo": {"workflow": {"nodes": []}}, "filename_prefix": "video/held"}
    out = node.sample(model=parts[0], vae=parts[1], **given)
    _, images, videos, text_report = out["result"]
    report = json.loads(text_report)
    path = Path(report["files"][0]["path"])
    assert report["files"][0]["frames"] == 18
    assert path.parent == host.base / "output" / "video"
    assert out["ui"]["images"] == [{"filename": path.name, "subfolder": "video", "type": "output"}]
    assert out["ui"]["animated"] == (True,)
    assert out["ui"]["fastar_report"] == [text_report]
    frames = read_video(path)
    assert frames.shape == pictures.shape
    assert (frames - pictures).abs().mean() < 0.06  # lossy codec, colours at half resolution
    assert (frames.flip(0) - pictures).abs().mean() > (frames - pictures).abs().mean()
    assert torch.equal(images, pictures[9:])  # the last block; the first of 3 latent frames gave 9
    assert torch.equal(videos[0].get_components().images, frames)


def test_long_videos_go_to_a_file_by_themselves(host: Host, parts: tuple[Any, Any]) -> None:
    size = {"width": 16, "height": 16, "frames_to": "auto"}
    _, images, _, short = sample(host, *parts, length=129, **size)
    assert (json.loads(short)["frames"]["to"], len(images)) == ("memory", 129)
    latent, images, videos, long = sample(host, *parts, length=130, **size)
    assert json.loads(long)["frames"]["to"] == "file"
    assert latent.shape[2] == 34
    assert len(images) <= 12
    assert len(videos[0].get_components().images) == 130


def test_decoding_between_blocks_and_at_the_end_agree(host: Host, parts: tuple[Any, Any]) -> None:
    between = sample(host, *parts, decode="between blocks")
    end = sample(host, *parts, decode="at the end")
    assert torch.equal(between[0], end[0])
    assert (between[1] - end[1]).abs().max() < 1e-5
    assert [json.loads(run[3])["decode"]["mode"] for run in (between, end)] == ["between blocks", "at the end"]


def test_odd_token_grids_and_framewise_blocks(host: Host, parts: tuple[Any, Any]) -> None:
    size = {"width": 40, "height": 24, "length": 10}
    latent, images, _, text_report = sample(host, *parts, preset="causal_forcing_framewise_2step", **size)
    assert (latent.shape, images.shape) == ((1, 16, 4, 3, 5), (10, 24, 40, 3))
    assert json.loads(text_report)["counts"]["model_calls"] == {"denoise": 4 + 3 * 2, "clean": 3}


def test_a_fixed_window_is_not_the_full_cache(host: Host, parts: tuple[Any, Any]) -> None:
    full = sample(host, *parts, length=49)[0]
    window = sample(host, *parts, length=49, cache="sink_window", window=6, sink=0)[0]
    assert torch.equal(full[:, :, :6], window[:, :, :6])
    assert (full[:, :, 6:9] - window[:, :, 6:9]).abs().max() > 1e-3
