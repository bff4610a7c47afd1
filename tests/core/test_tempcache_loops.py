"""TempCache under the drivers: prompt switches (keep, drop, rebuild), rolling windows, restarts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.tempcache_tools import Synthetic, equal, similar_frames, state, tc
from fastar_pack.fastar_core.drivers import BlockwisePlan, LoopKind, Restart, run_plan
from fastar_pack.fastar_core.errors import GeometryError
from fastar_pack.fastar_core.noise import SeededRenoise, seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.sigmas import SigmaSchedule, warp
from tiny.plain_engine import PlainEngine
from tiny.weights import random_weights

pytestmark = pytest.mark.cpu
WEIGHTS = random_weights(std=0.1, peak=1.7)
HEADS, SIZE, SEED = 4, (4, 6), 3
FIVE = warp((1000, 800, 600, 400, 200), 5.0)
ALL = {"budget_frames": 60, "threshold": 1.01}
MERGING = {"budget_frames": 8, "threshold": 0.9, "floor": 0.3}


def rollout(settings: PolicySettings, frames: int, loop: LoopKind = "blockwise", prefix: int = 0, sigmas: tuple[float, ...] = (1.0, 0.6),
            call_frames: int = 0, **changes: Any) -> tuple[Tensor, PlainEngine]:
    """Latents of a run of a tiny model, two prompts at hand, and its engine."""
    shape = (1, 16, frames, *SIZE)
    texts = [seeded_normal(80 + i, (1, 16, 64)) for i in range(2)]
    engine = PlainEngine(WEIGHTS, texts, HEADS, shape, 3, settings)
    longest = call_frames or (15 if loop == "rolling" else 0)
    engine.run.geometry = replace(engine.run.geometry, call_frames=min(longest, frames))
    clean = seeded_normal(9, (1, 16, prefix, *SIZE)) if prefix else None
    plan = BlockwisePlan(seeded_normal(7, shape), SigmaSchedule(sigmas), 3, SeededRenoise(SEED), clean)
    return torch.cat([done.latent for done in run_plan(loop, engine, replace(plan, **changes))], 2), engine


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


# -- rolling windows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("frames", "prefix"), [(15, 0), (30, 0), (6, 0), (24, 4), (17, 0)])
@pytest.mark.parametrize("changes", [{}, {"space": "pre", "representative": "last"}, {"reindex_span": 60}])
def test_rolling_with_everything_kept_is_the_extended_history(frames: int, prefix: int, changes: dict[str, Any]) -> None:
    wanted, _ = rollout(PolicySettings("rolling", None, 3), frames, "rolling", prefix, FIVE)
    got, _ = rollout(tc(sink=3, **ALL, **changes), frames, "rolling", prefix, FIVE)
    assert far(got, wanted) <= 2e-5
    if frames == 30:
        assert far(rollout(tc(sink=3, **MERGING), frames, "rolling", prefix, FIVE)[0], wanted) > 1e-2


@pytest.mark.parametrize("sink", [0, 1, 3])
@pytest.mark.parametrize("recent", [0, 2, 3])
@pytest.mark.parametrize("prefix", [0, 4])
def test_passes_that_nobody_reads_change_nothing(sink: int, recent: int, prefix: int) -> None:
    settings = tc(sink=sink, recent_frames=recent, **MERGING)
    runs = [rollout(settings, 28, "rolling", prefix, FIVE, clean_last=clean_last) for clean_last in (False, True)]
    assert torch.equal(runs[0][0], runs[1][0])
    told = [engine.run.report()["cache"]["positive"]["blocks"] for _, engine in runs]  # type: ignore[index]
    assert [b["start"] for b in told[1]] == sorted({b["start"] for b in told[1]}), "a block is told once"
    assert told[0] == told[1][:len(told[0])]


# -- prompt switches -------------------------------------------------------------------------------------------------


def switched(mode: str, frames: int, merging: dict[str, Any], **more: Any) -> Synthetic:
    """24 frames under one prompt, a recache of the last ``frames`` under another."""
    run = Synthetic(tc(sink=2, recache=mode, **merging), call_frames=12, **more).go(24)
    run.make = similar_frames(1, 6, 2, 24, seed=5)
    run.call("recache", 24 - frames, frames)
    return run


@pytest.mark.parametrize("changes", [{}, {"space": "pre"}, {"reindex_span": 9}])
def test_keep_rewrites_pinned_frames_and_leaves_groups_alone(changes: dict[str, Any]) -> None:
    before = Synthetic(tc(sink=2, **MERGING, **changes)).go(24)
    after = switched("keep", 6, MERGING | changes)
    assert after.policy.ledger.frames == before.policy.ledger.frames
    assert all(torch.equal(a, b) for a, b in zip(before.pool().tensors()[-5:], after.pool().tensors()[-5:]))
    for slot, frame in enumerate(after.policy.ledger.frames):
        span = slice(6 * slot, 6 * slot + 6)
        same = torch.equal(before.store().values[:, :, span], after.store().values[:, :, span])
        assert same == (frame < 18)
        if frame >= 18:
            place = after.policy.call_positions or after.policy.position(torch.tensor([frame]), 24).tolist()
            wanted = after.policy.rotary.rotate(after.qkv("recache", frame, 1, 0)[1], place[:1]).transpose(1, 2)
            assert far(after.store().keys[:, :, span], wanted) <= 1e-5
    with pytest.raises(GeometryError, match="can undo nothing"):
        after.policy.rollback(21)


def test_keep_sees_history_sink_and_the_frames_in_the_new_prompt() -> None:
    run = switched("keep", 3, ALL)
    old, new = similar_frames(1, 6, 2, 24), similar_frames(1, 6, 2, 24, seed=5)
    out = run.call("denoise", 24, 3)[0]
    rotary = run.policy.rotary
    past = [(old("clean", f, 0) if f < 21 else new("recache", f, 0)) for f in range(24)]
    q, own_k, own_v = run.qkv("denoise", 24, 3, 0)
    keys = torch.cat([rotary.rotate(p[1], [f]) for f, p in enumerate(past)] + [rotary.rotate(own_k, [24, 25, 26])], 1)
    values = torch.cat([p[2] for p in past] + [own_v], 1)
    scores = torch.einsum("bqhd,bkhd->bhqk", rotary.rotate(q, [24, 25, 26]), keys) / run.dim**0.5
    assert far(out, (scores.softmax(-1) @ values.transpose(1, 2)).transpose(1, 2)) <= 1e-5


@pytest.mark.parametrize("frames", [3, 6, 12])
@pytest.mark.parametrize("recent", [0, 3, 4])
def test_drop_starts_anew_from_the_recached_frames(frames: int, recent: int) -> None:
    settings = MERGING | {"recent_frames": recent}
    run = switched("drop", frames, settings)
    fresh = Synthetic(tc(sink=2, **settings), call_frames=12, make=run.make)
    fresh.call("prefill", 0, 1)
    fresh.policy._restart(24 - frames)
    fresh.call("clean", 24 - frames, frames)
    assert equal(state(run.policy), state(fresh.policy))
    assert run.policy.visible_frames(24, 3) == tuple(range(24 - frames, 27))
    told, left = run.blocks()[-1], max(0, frames - 2 - recent)
    assert (told["left_recent"], told["merged"][0] + told["opened"][0]) == (left, 6 * left)
    held = run.pool().frame[run.pool().count > 0].tolist()
    assert set(held) <= set(range(26 - frames, 24 - recent)), "nothing of the frames before"
    assert torch.equal(run.call("denoise", 24, 3), fresh.call("denoise", 24, 3))


def test_a_recache_has_to_end_where_the_frames_end() -> None:
    run = Synthetic(tc(**MERGING)).go(24)
    with pytest.raises(GeometryError, match="must end at the last committed latent frame 24, not 23"):
        run.call("recache", 20, 3)
    drop = Synthetic(tc(recache="drop", **MERGING)).go(24)
    with pytest.raises(GeometryError, match="a call of 6 latent frames is longer than the 3"):
        drop.call("recache", 18, 6)


@pytest.mark.parametrize("mode", ["keep", "drop", "rebuild"])
def test_a_run_with_a_prompt_switch(mode: str) -> None:
    changes: dict[str, Any] = {"recache_frames": 6, "rebuild": mode == "rebuild", "prompt_at": lambda frame: int(frame >= 15)}
    runs = {}
    for name, settings in (("full", PolicySettings(recache=mode)), ("all kept", tc(sink=3, recache=mode, **ALL)),  # type: ignore[arg-type]
                           ("merging", tc(sink=3, recache=mode, **MERGING))):
        runs[name] = rollout(settings, 27, call_frames=6, **changes)[0]
    plain = rollout(tc(sink=3, **ALL), 27)[0]
    assert torch.equal(runs["all kept"][:, :, :15], plain[:, :, :15])
    assert far(runs["all kept"][:, :, 15:18], plain[:, :, 15:18]) > 1e-2
    if mode == "rebuild":
        assert far(runs["full"], runs["all kept"]) <= 2e-5
    assert torch.isfinite(runs["merging"]).all()
    assert far(runs["merging"][:, :, 21:], runs["all kept"][:, :, 21:]) > 1e-2


@pytest.mark.parametrize("keep_first", [True, False])
def test_a_timeline_that_starts_over(keep_first: bool) -> None:
    restart = Restart(12, 3, 9, lambda back: seeded_normal(back, (1, 16, 1, *SIZE)), keep_first)
    full, _ = rollout(PolicySettings(), 24, restart=restart)
    got, _ = rollout(tc(sink=1, **ALL), 24, restart=restart)
    assert far(full, got) <= 2e-5
    assert far(full, rollout(tc(sink=1, **ALL), 24)[0]) > 1e-2


def test_a_prefill_of_frame_0_starts_a_new_timeline() -> None:
    run, fresh = Synthetic(tc(**MERGING)).go(24), Synthetic(tc(**MERGING))
    for one in (run, fresh):
        one.call("prefill", 0, 2)
        one.call("denoise", 2, 3)
    assert torch.equal(run.outputs[-1], fresh.outputs[-1])
    assert equal(state(run.policy), state(fresh.policy))
