"""The compressed history outlives the restarts of Krea's and CausVid's timelines when asked to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastar_pack.fastar_core.attention import Attention
from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.geometry import RunGeometry
from fastar_pack.fastar_core.policies import PolicySettings, make_policy
from fastar_pack.fastar_core.positions import RopeSpec, Rotary
from fastar_pack.fastar_core.presets import get_preset
from fastar_pack.fastar_core.run_choice import choose_run
from fastar_pack.fastar_core.tempcache.plan import plan_tempcache
from fastar_pack.fastar_core.tempcache.policy import TempCache
from fastar_pack.fastar_core.tempcache.settings import FAMILY_CONTEXT, TempCacheSettings

pytestmark = pytest.mark.cpu
ROWS, COLS, HEADS, DIM, CONTEXT, BLOCK = 2, 3, 2, 24, 3, 3
TOKENS = ROWS * COLS
SETTINGS = TempCacheSettings(budget_frames=60.0, threshold=1.01, carry_frames=CONTEXT)


def context(phase: str, start: int, count: int) -> FwdCtx:
    sigma = 0.5 if phase == "denoise" else 0.0
    return FwdCtx(phase, start, count, (sigma,) * count, (1000 * sigma,) * count, ROWS, COLS)  # type: ignore[arg-type]


class Runner:
    """Krea's calls with random rows: every round prefills 3 context frames and denoises 3 more. Keeps the dense truth."""

    def __init__(self, settings: TempCacheSettings = SETTINGS) -> None:
        policy = PolicySettings("tempcache", sink_frames=0, tempcache=settings)
        made = make_policy(policy, RunGeometry(6, BLOCK, ROWS, COLS, 1), RopeSpec(DIM), Attention("reference"))
        assert isinstance(made, TempCache)
        self.policy, self.rotary = made, Rotary(RopeSpec(DIM), ROWS, COLS)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.generator = torch.Generator().manual_seed(0)

    def call(self, phase: str, start: int, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the policy answers, dense attention over all committed frames at their places and the own ones)."""
        q, k, v = (torch.randn(1, BLOCK * TOKENS, HEADS, DIM, generator=self.generator) for _ in range(3))
        ctx = context(phase, start, BLOCK)
        self.policy.begin(ctx)
        out = self.policy.attend(0, q, k, v, ctx)
        self.policy.commit(ctx)
        frames = [start + shift + i for i in range(BLOCK)]
        rotated = self.rotary.rotate(k, frames)
        keys, values = torch.cat([*self.keys, rotated], 1), torch.cat([*self.values, v], 1)
        truth = Attention("reference").attend(self.rotary.rotate(q, frames), keys, values)
        if phase != "denoise":
            self.keys.append(rotated)
            self.values.append(v)
        return out, truth

    def round(self, number: int) -> float:
        """Largest difference of a round from the dense truth. Each timeline begins 3 frames later than the one before."""
        shift = number * BLOCK
        pairs = [self.call("prefill", 0, shift), self.call("denoise", CONTEXT, shift), self.call("denoise", CONTEXT, shift)]
        return max(float((out - truth).abs().max()) for out, truth in pairs)


def test_everything_carried_is_seen_where_it_stood() -> None:
    runner = Runner()
    assert max(runner.round(n) for n in range(5)) < 1e-5
    counts = runner.policy.stores(0)[0].pool
    assert counts is not None
    assert int(counts.count.sum()) == 4 * CONTEXT * TOKENS, "four finished timelines of three committed frames"


@pytest.mark.parametrize("changes", [{"history_type": "int8"}, {"shared": False}, {"space": "pre"}])
def test_also_in_other_stores(changes: dict[str, object]) -> None:
    runner = Runner(replace(SETTINGS, **changes))
    assert max(runner.round(n) for n in range(4)) < 1e-3


def test_forgetting_is_what_the_family_does() -> None:
    runner = Runner(replace(SETTINGS, carry_frames=0))
    runner.round(0)
    assert runner.round(1) > 1e-2
    runner.keys, runner.values = [], []
    assert runner.round(2) < 1e-5, "a restart leaves nothing behind"


def test_memory_stays_flat_over_many_restarts() -> None:
    runner = Runner(replace(SETTINGS, budget_frames=8.0, threshold=0.9))
    sizes = []
    for number in range(60):
        shift = number * BLOCK
        runner.call("prefill", 0, shift)
        runner.call("denoise", CONTEXT, shift)
        runner.keys, runner.values = [], []
        sizes.append(runner.policy.bytes())
    assert len(set(sizes[20:])) == 1


def test_a_restart_takes_no_memory() -> None:
    """What the old timeline could take back is dropped: nothing is remembered for an undo that cannot come."""
    settings = replace(SETTINGS, budget_frames=12.0, threshold=0.9)
    runner = Runner(settings)
    planned = plan_tempcache(settings, 0, RunGeometry(6, BLOCK, ROWS, COLS, 1), HEADS, DIM, 4, 1).total_bytes
    for number in range(12):
        runner.round(number)
        before = runner.policy.bytes()
        runner.policy.begin(context("prefill", 0, BLOCK))
        assert runner.policy.bytes() <= before <= planned


def test_the_family_fills_in_its_context() -> None:
    policy = PolicySettings("tempcache", sink_frames=1, tempcache=replace(SETTINGS, carry_frames=FAMILY_CONTEXT))
    carried = {key: choose_run(get_preset(key), policy, 4).policy.tempcache for key in ("krea", "causvid", "self_forcing")}
    assert [c.carry_frames for c in carried.values() if c is not None] == [3, 3, 0]
