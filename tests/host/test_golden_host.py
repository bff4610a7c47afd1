"""The frozen reference runs through the host's own forward, from a file or from an explicit configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fastar_pack.fastar_core.policies import PolicySettings
from host.host_tools import build, load_from_file, stream
from tests_support import Host
from tiny.golden import RUN_TOLERANCE, Golden, load_golden

pytestmark = pytest.mark.cpu
CALL_TOLERANCE = 5e-5  # the references embed time in float64, hosts in float32
FULL = PolicySettings()
WINDOW = PolicySettings("sink_window", 12, 3)
ROLLING = PolicySettings("rolling", 21, 3)
FROM_FILE = ("A1", "A6")
CASES = {"A1": FULL, "A2": WINDOW, "A3": FULL, "A4": ROLLING, "A6": FULL}


def model(golden: Golden, name: str, folder: Path) -> Any:
    if name in FROM_FILE:
        return load_from_file(golden, folder)
    return build(golden.weights, golden.meta["heads"], golden.meta["text_dim"])


def replay(golden: Golden, patcher: Any, settings: PolicySettings, **changes: Any) -> tuple[Tensor, list[Tensor]]:
    steps: list[Tensor] = []
    options = {"renoise": golden.renoise, "loop": golden.meta["driver"], "clean_last": True, "schedule": golden.schedule}
    out = stream(
        patcher,
        golden.tensors["noise"],
        golden.tensors["text.0"],
        policy=settings,
        block=golden.meta["block"],
        on_step=lambda block, step, count, x0: steps.append(x0.clone()),
        **(options | changes),
    )
    return out, steps


@pytest.mark.parametrize("name", CASES)
def test_golden_run(name: str, host: Host, tmp_path: Path) -> None:
    golden = load_golden(name)
    report: dict[str, Any] = {}
    out, steps = replay(golden, model(golden, name, tmp_path), CASES[name], report=report)
    assert (out - golden.tensors["out"]).abs().max() < RUN_TOLERANCE
    counts = report["model_calls"]
    assert {kind: counts[kind] for kind in ("denoise", "clean")} == {
        kind: sum(call["kind"] == kind for call in golden.calls) for kind in ("denoise", "clean")
    }
    assert counts["attention_calls"] == 2 * len(golden.calls), "every self-attention of both layers came to the cache"
    denoise = [i for i, call in enumerate(golden.calls) if call["kind"] == "denoise"]
    assert len(steps) == len(denoise)
    for i, x0 in zip(denoise, steps):
        if i < golden.meta["num_recorded_calls"]:
            assert (x0 - golden.tensors[f"call.{i:03d}.x0"]).abs().max() < CALL_TOLERANCE, f"call {i}"


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("A2", replace(WINDOW, window_frames=9)),
        ("A2", replace(WINDOW, sink_frames=0)),
        ("A2", FULL),
        ("A3", PolicySettings("sink_window", 3)),
        ("A4", replace(ROLLING, window_frames=24)),
    ],
)
def test_wrong_cache_rules_are_far_away(name: str, wrong: PolicySettings, host: Host, tmp_path: Path) -> None:
    golden = load_golden(name)
    out, _ = replay(golden, model(golden, name, tmp_path), wrong)
    assert (out - golden.tensors["out"]).abs().max() > 0.05


def test_seeded_draws_reproduce_the_stock_samplers_run(host: Host, tmp_path: Path) -> None:
    """A6 from its seed alone: our own draws instead of the recorded ones."""
    golden = load_golden("A6")
    patcher = load_from_file(golden, tmp_path)
    seed = golden.meta["seed"]
    out, _ = replay(golden, patcher, FULL, renoise=None, seed=seed)
    assert (out - golden.tensors["out"]).abs().max() < RUN_TOLERANCE
    latent = patcher.model.process_latent_out(out)
    assert (latent - golden.tensors["host_latent"]).abs().max() < 5 * RUN_TOLERANCE
    other, _ = replay(golden, patcher, FULL, renoise=None, seed=seed + 1)
    assert (other - golden.tensors["out"]).abs().max() > 0.1


def test_files_with_metadata_load_as_the_hosts_own_class(host: Host, tmp_path: Path) -> None:
    network = load_from_file(load_golden("A6"), tmp_path).model.diffusion_model
    newer = tuple(int(part) for part in host.version.split(".")[:2]) >= (0, 27)
    assert type(network).__name__ == ("CausalWanModel" if newer else "WanModel")
