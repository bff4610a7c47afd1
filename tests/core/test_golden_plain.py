"""The engine reproduces the frozen reference runs through the plain forward; known wrong rules do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastar_pack.fastar_core.drivers.blockwise import BlockwisePlan, run_blockwise
from fastar_pack.fastar_core.drivers.rolling import run_rolling
from fastar_pack.fastar_core.policies import PolicySettings
from tiny.golden import CALL_TOLERANCE, RUN_TOLERANCE, Golden, load_golden
from tiny.plain_engine import PlainEngine

pytestmark = pytest.mark.cpu
FULL = PolicySettings()
WINDOW = PolicySettings(kind="sink_window", window_frames=12, sink_frames=3)
CASES = {"A1": FULL, "A2": WINDOW, "A3": FULL, "A6": FULL}


def sample(golden: Golden, settings: PolicySettings, **changes: object) -> tuple[torch.Tensor, PlainEngine]:
    meta = golden.meta
    engine = PlainEngine(golden.weights, [golden.tensors["text.0"]], meta["heads"], meta["latent_shape"], meta["block"],
                         settings, torch.float32 if meta.get("sinusoid_dtype") == "float32" else torch.float64, keep_calls=True)
    plan = BlockwisePlan(golden.tensors["noise"], golden.schedule, meta["block"], golden.renoise, clean_last=True)
    plan = replace(plan, **changes)
    latents = [done.latent for done in run_blockwise(engine, plan)]
    return torch.cat(latents, dim=2), engine


@pytest.mark.parametrize("name", CASES)
def test_golden_run(name: str) -> None:
    golden = load_golden(name)
    out, engine = sample(golden, CASES[name])
    assert (out - golden.tensors["out"]).abs().max() < RUN_TOLERANCE
    check_calls(golden, engine)


def check_calls(golden: Golden, engine: PlainEngine) -> None:
    """Every call in order, and the recorded ones in value."""
    assert [(c.start, c.num_frames, c.phase) for c, _, _ in engine.record] == [
        (c["start"], c["frames"], c["kind"]) for c in golden.calls
    ]
    for i, (ctx, x0, v) in enumerate(engine.record[: golden.meta["num_recorded_calls"]]):
        key = f"call.{i:03d}"
        assert torch.equal(torch.tensor(ctx.timesteps), golden.tensors[key + ".t"][0])
        got, want = (x0, golden.tensors[key + ".x0"]) if ctx.phase == "denoise" else (v, golden.tensors[key + ".v"])
        assert (got - want).abs().max() < 5 * CALL_TOLERANCE, f"call {i}"


@pytest.mark.parametrize(("name", "wrong"), [
    ("A2", replace(WINDOW, window_frames=9)),
    ("A2", replace(WINDOW, window_frames=15)),
    ("A2", replace(WINDOW, sink_frames=0)),
    ("A2", replace(WINDOW, positions="slot")),
    ("A2", FULL),
])
def test_wrong_cache_rules_are_far_away(name: str, wrong: PolicySettings) -> None:
    golden = load_golden(name)
    out, _ = sample(golden, wrong)
    assert (out - golden.tensors["out"]).abs().max() > 0.1


def test_missing_first_block_list_is_far_away() -> None:
    golden = load_golden("A3")
    schedule = replace(golden.schedule, first_block=None, first_timesteps=None)
    meta = golden.meta
    draws = [torch.randn(1, 16, 1, 8, 8) for _ in range(99)]
    engine = PlainEngine(golden.weights, [golden.tensors["text.0"]], meta["heads"], meta["latent_shape"], 1, FULL)
    renoise = type(golden.renoise)(draws)
    plan = BlockwisePlan(golden.tensors["noise"], schedule, 1, renoise)
    out = torch.cat([d.latent for d in run_blockwise(engine, plan)], dim=2)
    assert (out - golden.tensors["out"]).abs().max() > 0.1


ROLLING = PolicySettings(kind="rolling", window_frames=21, sink_frames=3)


def sample_rolling(golden: Golden, settings: PolicySettings) -> tuple[torch.Tensor, PlainEngine]:
    meta = golden.meta
    engine = PlainEngine(golden.weights, [golden.tensors["text.0"]], meta["heads"], meta["latent_shape"], meta["block"],
                         settings, torch.float64, keep_calls=True)
    plan = BlockwisePlan(golden.tensors["noise"], golden.schedule, meta["block"], golden.renoise, clean_last=True)
    return torch.cat([done.latent for done in run_rolling(engine, plan)], dim=2), engine


def test_golden_rolling() -> None:
    golden = load_golden("A4")
    out, engine = sample_rolling(golden, ROLLING)
    print((out - golden.tensors["out"]).abs().max(), golden.meta)
    check_calls(golden, engine)
    assert (out - golden.tensors["out"]).abs().max() < RUN_TOLERANCE


def sample_switched(golden: Golden, settings: PolicySettings, recache_frames: int | None = 12) -> torch.Tensor:
    meta = golden.meta
    prompts = [golden.tensors[key] for key in sorted(golden.tensors) if key.startswith("text.")]
    engine = PlainEngine(golden.weights, prompts, meta["heads"], meta["latent_shape"], meta["block"], settings, torch.float64,
                         keep_calls=True)
    plan = BlockwisePlan(golden.tensors["noise"], golden.schedule, meta["block"], golden.renoise, clean_last=True,
                         prompt_at=lambda frame: sum(frame >= at for at in meta["switch_frames"]), recache_frames=recache_frames)
    out = torch.cat([done.latent for done in run_blockwise(engine, plan)], dim=2)
    if recache_frames:
        check_calls(golden, engine)
        asked = [ctx.prompt_id for ctx, _, _ in engine.record]
        assert asked == [call["prompt"] for call in golden.calls]
    return out


def test_golden_prompt_switch() -> None:
    golden = load_golden("A5")
    out = sample_switched(golden, WINDOW)
    assert (out - golden.tensors["out"]).abs().max() < RUN_TOLERANCE


def test_wrong_switch_rules_are_far_away() -> None:
    golden = load_golden("A5")
    for wrong, recache in ((replace(WINDOW, recache="drop"), 12), (WINDOW, None), (replace(WINDOW, positions="slot"), 12)):
        out = sample_switched(golden, wrong, recache) if recache is None else _switched_unchecked(golden, wrong)
        assert (out - golden.tensors["out"]).abs().max() > 0.1


def _switched_unchecked(golden: Golden, settings: PolicySettings) -> torch.Tensor:
    meta = golden.meta
    prompts = [golden.tensors[key] for key in sorted(golden.tensors) if key.startswith("text.")]
    engine = PlainEngine(golden.weights, prompts, meta["heads"], meta["latent_shape"], meta["block"], settings, torch.float64)
    plan = BlockwisePlan(golden.tensors["noise"], golden.schedule, meta["block"], golden.renoise,
                         prompt_at=lambda frame: sum(frame >= at for at in meta["switch_frames"]), recache_frames=12)
    return torch.cat([done.latent for done in run_blockwise(engine, plan)], dim=2)
