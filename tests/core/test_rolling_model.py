"""Rolling-Forcing through a real (tiny) model equals an independent writing of its rules; wrong rules are far away."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from core.rolling_oracle import Places, RollingOracle
from fastar_pack.fastar_core.drivers import BlockwisePlan, LoopKind, run_plan
from fastar_pack.fastar_core.noise import SeededRenoise, seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.sigmas import SigmaSchedule, warp
from tiny.golden import RUN_TOLERANCE
from tiny.plain_engine import PlainEngine
from tiny.weights import random_weights

pytestmark = pytest.mark.cpu
WEIGHTS = random_weights(std=0.1, peak=1.7)
HEADS, SEED = 4, 3
FIVE, FOUR = warp((1000, 800, 600, 400, 200), 5.0), warp((1000, 750, 500, 250), 5.0)
# name -> frames, levels, window (None = extended history), sink, block, prefix, batch, latent size
CASES: dict[str, tuple[int, tuple[float, ...], int | None, int, int, int, int, tuple[int, int]]] = {
    "ramp-up and down": (15, FIVE, 21, 3, 3, 0, 1, (8, 8)),
    "working frames": (24, FIVE, 21, 3, 3, 0, 1, (8, 12)),
    "eviction": (48, FIVE, 21, 3, 3, 0, 1, (4, 4)),
    "small window, 2 levels": (30, FIVE[:2], 12, 3, 3, 0, 1, (8, 8)),
    "4 levels": (24, FOUR, 21, 3, 3, 0, 1, (8, 8)),
    "fewer blocks than levels": (6, FIVE, 21, 3, 3, 0, 1, (8, 8)),
    "short last block": (17, FIVE[:3], 12, 3, 3, 0, 1, (8, 8)),
    "batch 2, odd grid": (18, FIVE[:3], 15, 3, 3, 0, 2, (9, 13)),
    "other sink and block": (22, FIVE[:3], 13, 4, 2, 0, 1, (8, 12)),
    "no sink": (18, FIVE[:2], 9, 0, 3, 0, 1, (8, 8)),
    "prefix": (22, FIVE[:3], 15, 3, 3, 4, 2, (8, 12)),
    "extended history": (36, FIVE, None, 3, 3, 0, 1, (4, 4)),
}


def oracle(name: str, kind: type[RollingOracle] = RollingOracle) -> RollingOracle:
    frames, sigmas, limit, sink, block, prefix, batch, size = CASES[name]
    clean = seeded_normal(9, (batch, 16, prefix, *size)) if prefix else None
    return kind(WEIGHTS, HEADS, seeded_normal(8, (batch, 16, 64)), seeded_normal(7, (batch, 16, frames, *size)), sigmas, SEED, block,
                limit, sink, clean)


def engine_run(one: RollingOracle, loop: LoopKind = "rolling", **changes: object) -> Tensor:
    """The same through policy and driver."""
    settings = PolicySettings("rolling", one.limit, one.sink)
    engine = PlainEngine(one.weights, [one.text], one.heads, tuple(one.noise.shape), one.block, settings)
    plan = BlockwisePlan(one.noise, SigmaSchedule(tuple(one.sigmas)), one.block, SeededRenoise(one.seed), one.prefix)
    parts = [] if one.prefix is None else [one.prefix]
    return torch.cat(parts + [done.latent for done in run_plan(loop, engine, replace(plan, **changes))], 2)


@cache
def right(name: str) -> Tensor:
    return engine_run(oracle(name))


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name: str) -> None:
    want = oracle(name).run()
    assert want.std() > 0.3
    assert far(right(name), want) < RUN_TOLERANCE / 10


def test_order_of_calls_equals_the_oracle_with_all_passes() -> None:
    one = oracle("working frames")
    one.run()
    calls: list[tuple[str, int, int]] = []
    plan = BlockwisePlan(one.noise, SigmaSchedule(tuple(one.sigmas)), 3, SeededRenoise(0), clean_last=True)
    list(run_plan("rolling", lambda x, ctx: calls.append((ctx.phase, ctx.start, ctx.num_frames)) or x / 2, plan))  # type: ignore[func-returns-value]
    assert calls == one.calls


class AnchorLeftBehind(RollingOracle):
    def anchor_position(self, start: int, working: int) -> int:
        return 0


class OneBlockMore(RollingOracle):
    def working(self, start: int, count: int) -> list[int]:
        return list(range(max(self.sink, start - len(super().working(start, count)) - self.block), start))


class NoWorking(RollingOracle):
    def working(self, start: int, count: int) -> list[int]:
        return []


class NoAnchor(RollingOracle):
    def denoise_keys(self, start: int, count: int) -> Places:
        return [place for place in super().denoise_keys(start, count) if place[0] >= self.sink]


class CleanSeesTheAnchorAlways(RollingOracle):
    def clean_keys(self, start: int, count: int) -> Places:
        return sorted({*super().clean_keys(start, count), *((frame, frame) for frame in range(min(self.sink, start)))})


class CleanSeesItselfOnly(RollingOracle):
    def clean_keys(self, start: int, count: int) -> Places:
        return []


class CleanAtTheLastLevel(RollingOracle):
    def clean_time(self) -> float:
        return 1000 * self.sigmas[-1]


class LevelsTheOtherWayRound(RollingOracle):
    def level(self, window: int, block: int) -> int:
        members = range(max(0, window - len(self.sigmas) + 1), min(len(self.spans()) - 1, window) + 1)
        return sum((members[0], members[-1])) - block - max(0, window - len(self.spans()) + 1) if len(members) < 5 else window - block


@pytest.mark.parametrize(("wrong", "name"), [
    (AnchorLeftBehind, "eviction"), (AnchorLeftBehind, "small window, 2 levels"), (OneBlockMore, "working frames"),
    (OneBlockMore, "small window, 2 levels"), (NoWorking, "working frames"), (NoAnchor, "working frames"),
    (CleanSeesTheAnchorAlways, "small window, 2 levels"), (CleanSeesItselfOnly, "working frames"), (CleanAtTheLastLevel, "working frames"),
    (LevelsTheOtherWayRound, "fewer blocks than levels"),
])
def test_a_wrong_rule_is_far_away(wrong: type[RollingOracle], name: str) -> None:
    assert far(oracle(name, wrong).run(), right(name)) > 20 * RUN_TOLERANCE


@pytest.mark.parametrize("name", ["working frames", "fewer blocks than levels", "prefix", "short last block"])
def test_passes_that_nobody_reads_change_nothing(name: str) -> None:
    assert torch.equal(engine_run(oracle(name), clean_last=True), right(name))


def test_one_level_is_blockwise_sampling_of_one_step() -> None:
    """Golden invariant 7, with anchor and working range at work: the blockwise loop over the same policy."""
    for window in (None, 9):
        one = replace(oracle("eviction"), sigmas=(1.0,), limit=window, noise=oracle("eviction").noise[:, :, :21])
        assert torch.equal(engine_run(one), engine_run(one, "blockwise"))
        assert far(engine_run(one), one.run()) < RUN_TOLERANCE / 10
    assert far(engine_run(replace(one, limit=12)), engine_run(one)) > 20 * RUN_TOLERANCE


def test_extended_history_equals_stock_until_something_is_dropped() -> None:
    """Golden invariant 2: the anchor formula gives absolute positions while every frame is still there."""
    stock, free = right("working frames"), engine_run(replace(oracle("working frames"), limit=None))
    first_drop = next(s for s in range(0, 24, 3) if s - 3 > max(0, 21 - 3 - min(15, 24 - s)))
    assert first_drop == 9
    assert far(stock[:, :, :9], free[:, :, :9]) < 1e-5
    assert far(stock[:, :, 9:12], free[:, :, 9:12]) > RUN_TOLERANCE


def test_a_prompt_switch_leaves_the_frames_before_it() -> None:
    one = oracle("eviction")
    texts = [one.text, seeded_normal(80, tuple(one.text.shape))]
    outs = []
    for at in (99, 20):
        engine = PlainEngine(WEIGHTS, texts, HEADS, tuple(one.noise.shape), 3, PolicySettings("rolling", 21, 3))
        plan = BlockwisePlan(one.noise, SigmaSchedule(FIVE), 3, SeededRenoise(SEED), prompt_at=lambda frame, at=at: int(frame >= at))
        outs.append(torch.cat([done.latent for done in run_plan("rolling", engine, plan)], 2))
    assert torch.equal(outs[0][:, :, :21], outs[1][:, :, :21])
    assert far(outs[0][:, :, 21:24], outs[1][:, :, 21:24]) > 20 * RUN_TOLERANCE
