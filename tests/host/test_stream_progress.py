"""What the host and its user are told while a run goes on: progress, pictures, events, memory."""

from __future__ import annotations

import json
import logging
import sys
import types
from typing import Any

import pytest
import torch

from fastar_pack.fastar_core.errors import MemoryPlanError
from host.stream_parts import HEIGHT, WIDTH, CountingCalls, sample, text, tiny_model, tiny_wan_vae
from tests_support import Host

pytestmark = pytest.mark.cpu
Parts = tuple[Any, Any]


@pytest.fixture
def parts(host: Host) -> tuple[Any, Any]:
    return tiny_model(), tiny_wan_vae()


@pytest.fixture
def bar(host: Host, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, Any, Any]]:
    """(value, total, preview, node id) of every progress update of our node, before the host thins them out."""
    import comfy.utils

    seen: list[tuple[int, int, Any, Any]] = []

    def update(own: Any, value: int, total: int, preview: Any = None) -> None:
        if own.node_id == "42":
            seen.append((value, total, preview, own.node_id))

    monkeypatch.setattr(comfy.utils.ProgressBar, "update_absolute", update)
    return seen


def show_previews(monkeypatch: pytest.MonkeyPatch) -> None:
    from comfy.cli_args import LatentPreviewMethod, args

    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.Latent2RGB)


def test_every_model_call_counts_once(host: Host, parts: tuple[Any, Any], bar: list[Any]) -> None:
    report = json.loads(sample(host, *parts, length=29, unique_id="42")[3])
    values = [value for value, *_ in bar]
    calls = sum(report["counts"]["model_calls"].values())
    assert values == sorted(values)
    assert {total for _, total, *_ in bar} == {calls}
    assert (values[0], values[-1]) == (0, calls)
    assert set(values) == set(range(calls + 1))  # 2 clean passes: the bar also moves where nothing is returned


def test_the_prefix_counts_too(host: Host, parts: tuple[Any, Any], bar: list[Any]) -> None:
    start = {"samples": torch.zeros(1, 16, 4, HEIGHT // 8, WIDTH // 8)}
    report = json.loads(sample(host, *parts, length=29, start_latent=start, unique_id="42")[3])
    assert report["counts"]["model_calls"]["prefill"] == 2
    assert bar[-1][0] == bar[-1][1] == sum(report["counts"]["model_calls"].values())


def test_the_picture_shows_the_newest_frame(host: Host, parts: tuple[Any, Any], bar: list[Any],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    import latent_preview
    import numpy as np

    show_previews(monkeypatch)
    latent = sample(host, *parts, unique_id="42")[0]
    pictures = [preview for _, _, preview, _ in bar if preview is not None]
    assert len(pictures) == 8
    kind, image, size = pictures[-1]
    assert (kind, image.size, size) == ("JPEG", (WIDTH // 8, HEIGHT // 8), max(WIDTH, HEIGHT))
    base = parts[0].model
    previewer = latent_preview.get_previewer(torch.device("cpu"), base.latent_format)
    newest = previewer.decode_latent_to_preview(base.process_latent_in(latent)[:, :, -1:])
    older = previewer.decode_latent_to_preview(base.process_latent_in(latent)[:, :, 3:4])
    assert np.abs(np.asarray(image, int) - np.asarray(newest, int)).max() <= 1
    assert np.abs(np.asarray(image, int) - np.asarray(older, int)).max() > 1


def test_previewers_may_be_missing_or_broken(host: Host, parts: tuple[Any, Any], bar: list[Any],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    import latent_preview

    plain = sample(host, *parts, unique_id="42")[0]
    assert {preview for _, _, preview, _ in bar} == {None}
    broken = types.SimpleNamespace(decode_latent_to_preview_image=lambda *args: 1 / 0)
    monkeypatch.setattr(latent_preview, "get_previewer", lambda *args: broken)
    assert torch.equal(sample(host, *parts)[0], plain)
    monkeypatch.setattr(latent_preview, "get_previewer", lambda *args: 1 / 0)
    assert torch.equal(sample(host, *parts)[0], plain)


def test_each_block_is_announced(host: Host, parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[str, dict[str, Any], Any]] = []
    shown: list[str] = []
    instance = types.SimpleNamespace(
        client_id="me",
        send_sync=lambda name, data, sid=None: sent.append((name, data, sid)),
        send_progress_text=lambda text, node_id, sid=None: shown.append(text),
    )
    server = types.SimpleNamespace(PromptServer=types.SimpleNamespace(instance=instance))
    monkeypatch.setitem(sys.modules, "server", server)
    sample(host, *parts, length=31, unique_id="7")
    assert {name for name, _, sid in sent if sid == "me"} == {"fastar.block"}
    assert [data["frames"] for _, data, _ in sent] == [9, 21, 31]
    assert [data["block"] for _, data, _ in sent] == [1, 2, 3]
    last = sent[-1][1]
    assert last == {"node": "7", "block": 3, "blocks": 3, "frames": 31, "total_frames": 31, "eta_seconds": 0}
    assert sent[0][1]["eta_seconds"] > 0
    assert "block 2 of 3, frame 21 of 31" in shown[1]


def test_one_line_at_the_start_and_one_at_the_end(host: Host, parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        sample(host, *parts, length=20)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("FAST-AR")]
    assert len(lines) == 2
    assert "20 frames of 48 x 32 (6 latent frames, blocks of 3" in lines[0]
    assert "self_forcing" in lines[0]
    assert "decode between blocks" in lines[0]
    assert "done, 20 frames in" in lines[1]


@pytest.mark.parametrize(("changes", "branches"), [
    ({}, 1),
    ({"cfg": 3.0, "negative": text(2)}, 2),
    ({"cache": "sink_window", "window": 9, "sink": 3}, 1),
    ({"batch_size": 2}, 1),
])
def test_the_planned_bytes_are_the_real_ones(host: Host, parts: Parts, changes: dict[str, Any], branches: int) -> None:
    report = json.loads(sample(host, *parts, length=117, frames_to="file", width=32, **changes)[3])
    planned, peak = report["bytes"]["kv_planned"], report["bytes"]["kv_peak"]
    assert abs(planned - peak) <= 0.05 * planned
    assert report["counts"]["branches"] == branches


def test_what_cannot_fit_is_refused(host: Host, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastar_pack.nodes.host import memory

    calls = CountingCalls(monkeypatch)
    plan = json.loads(sample(host, *parts, length=117, frames_to="file")[3])["bytes"]
    made = len(calls.batches)
    call_bytes = plan["model_bytes"] - parts[0].model_size()
    monkeypatch.setattr(memory, "room_for", lambda device: call_bytes + plan["kv_planned"] - 1)
    with pytest.raises(MemoryPlanError, match="30 latent frames of 48 x 32.*GiB.*window of 26 latent frames.*length"):
        sample(host, *parts, length=117, frames_to="file")
    assert len(calls.batches) == made
    sample(host, *parts, length=117, frames_to="file", cache="sink_window", window=26, sink=3)
    with pytest.raises(MemoryPlanError):
        sample(host, *parts, length=117, frames_to="file", cache="sink_window", window=28, sink=3)


def test_frames_that_do_not_fit_are_refused(host: Host, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    from comfy import model_management

    need = 129 * 48 * 32 * 3 * 4
    plain = model_management.get_free_memory
    monkeypatch.setattr(model_management, "get_free_memory", lambda *args, **kw: need - 1)
    with pytest.raises(MemoryPlanError, match="frames_to to 'file'"):
        sample(host, *parts, length=129)
    monkeypatch.setattr(model_management, "get_free_memory", plain)


def test_the_host_plans_for_a_block_and_the_cache(host: Host, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.sampler_helpers
    from comfy import model_management

    shapes: list[tuple[int, ...]] = []
    freed: list[float] = []
    estimate, free = comfy.sampler_helpers.estimate_memory, model_management.free_memory
    monkeypatch.setattr(comfy.sampler_helpers, "estimate_memory",
                        lambda model, shape, conds: shapes.append(tuple(shape)) or estimate(model, shape, conds))
    monkeypatch.setattr(model_management, "free_memory",
                        lambda need, *args, **kw: freed.append(need) or free(need, *args, **kw))
    report = json.loads(sample(host, *parts, length=69)[3])
    assert {shape[2] for shape in shapes} == {3}
    assert report["bytes"]["kv_planned"] + report["bytes"]["model_bytes"] - parts[0].model_size() in freed


def test_a_model_unloaded_by_the_vae_comes_back(host: Host, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    from comfy import model_management

    from fastar_pack.nodes.host import stream_job

    model = parts[0].clone()
    weight = model.model.diffusion_model.head.head.weight
    model.add_patches({"diffusion_model.head.head.weight": ("diff", (torch.full_like(weight, 0.05),))})
    plain = sample(host, model, parts[1])[0]
    add = stream_job.MemoryFrames.add

    def unload(frames: Any, pictures: torch.Tensor) -> None:
        model_management.unload_all_models()
        add(frames, pictures)

    monkeypatch.setattr(stream_job.MemoryFrames, "add", unload)
    assert torch.equal(sample(host, model, parts[1])[0], plain)
    monkeypatch.setattr(stream_job, "ensure_loaded", lambda *args: None)
    assert not torch.equal(sample(host, model, parts[1])[0], plain)
