"""AnnSA behind every cache policy: what the policies say about their keys is true, and visiting everything changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.annsa_tools import SPARSE
from core.engine_tools import FULL, HEADS, LAYERS, Rollout, tiny_weights, window
from fastar_pack.fastar_core.annsa import AnnSASettings, SparseAttention
from fastar_pack.fastar_core.annsa.key_buffer import take
from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.key_rows import KeyRows
from fastar_pack.fastar_core.noise import seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.sigmas import SigmaSchedule
from fastar_pack.fastar_core.tempcache.settings import TempCacheSettings
from tiny.plain_engine import PlainEngine

pytestmark = pytest.mark.cpu
SHAPE = (2, 4, 16, 8, 8)
STEPS = SigmaSchedule((1.0, 0.8, 0.5))
ALL = replace(SPARSE, density=1.0)
POLICIES = {
    "full": FULL,
    "window": window(9, 1),
    "window without sink": window(7),
    "slots": window(9, 1, positions="slot"),
    "tempcache": PolicySettings("tempcache", sink_frames=1, tempcache=TempCacheSettings(budget_frames=7.0, recent_frames=2, threshold=0.5)),
    "tempcache by head": PolicySettings("tempcache", sink_frames=1, tempcache=TempCacheSettings(
        budget_frames=6.0, recent_frames=2, threshold=0.5, shared=False, quiet_heads=((0, 1),))),
    "tempcache squeezed": PolicySettings("tempcache", sink_frames=1, tempcache=TempCacheSettings(
        budget_frames=7.0, recent_frames=1, reindex_span=6)),
}


def rollout(policy: PolicySettings, settings: AnnSASettings | None) -> tuple[Tensor, Rollout]:
    made = Rollout(SHAPE, 2, policy, schedule=STEPS)
    if settings is not None:
        run = made.engine.run
        run.sparse = run.attention.sparse = SparseAttention(settings, STEPS.sigmas)
    with torch.no_grad():
        return made.run(), made


@pytest.mark.parametrize("name", POLICIES)
def test_visiting_everything_is_dense(name: str) -> None:
    plain, _ = rollout(POLICIES[name], None)
    out, made = rollout(POLICIES[name], ALL)
    assert (out - plain).abs().max() <= 1e-4 * plain.abs().max()
    report = made.engine.run.report()["annsa"]
    assert report["calls"]["sparse"] >= 2 * LAYERS * 2
    assert report["density"] == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["full", "tempcache"])
def test_fewer_pairs_are_visited_and_nothing_breaks(name: str) -> None:
    plain, _ = rollout(POLICIES[name], None)
    out, made = rollout(POLICIES[name], replace(SPARSE, density=0.7))
    report = made.engine.run.report()["annsa"]
    assert 0.45 < report["density"] <= 0.72
    assert out.isfinite().all()
    assert (out - plain).abs().max() > 1e-6


def test_bytes_count_the_sorted_copy_and_closing_frees_it() -> None:
    _, made = rollout(FULL, ALL)
    run = made.engine.run
    policy = sum(p.bytes() for p in run._policies.values())
    assert run.peak_bytes > policy, "the copy of a block counts"
    run.close()
    assert run.bytes() == 0


class Watch:
    """Compares the spans of KeyRows with the labels that frames carry in their values."""

    def __init__(self, run: Any, recent: int) -> None:
        self.run, self.recent, self.seen = run, recent, 0
        self.true = run.attention.attend
        run.attention.attend = self.attend

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, rows: KeyRows | None = None) -> Tensor:
        assert rows is not None
        always, history, own = rows.spans(self.recent)
        frames = [sorted(set(take(v, spans)[0, :, 0, 0].round().int().tolist())) for spans in (always, history, own)]
        ctx = rows.ctx
        shown = sorted({int(x) for x in v[0, :, 0, 0].round().tolist()})
        sink = [f for f in shown if f < min(rows.sink_end, ctx.start)]
        recent = [f for f in shown if ctx.start - self.recent <= f < ctx.start]
        assert frames[2] == list(range(ctx.start, ctx.end))
        assert frames[0] == sorted({*sink, *recent})
        assert frames[1] == [f for f in shown if f < ctx.start and f not in frames[0]]
        self.seen += bool(frames[1])
        return self.true(q, k, v, bias, rows=rows)


@pytest.mark.parametrize("policy", [FULL, window(9, 2), window(9, 1, positions="slot"), PolicySettings("rolling", 12, 2)])
def test_policies_tell_sink_recent_history_and_own_rows(policy: PolicySettings) -> None:
    rows, block, total = 2, 2, 20
    engine = PlainEngine(tiny_weights(), [seeded_normal(1, (1, 5, 8))], HEADS, (1, 4, total, 2 * rows, 2 * rows), block, policy)
    watch = Watch(engine.run, 2)
    for start in range(0, total, block):
        for phase, sigma in (("denoise", 0.5), ("clean", 0.0)):
            ctx = FwdCtx(phase, start, block, (sigma,) * block, (1000 * sigma,) * block, rows, rows, 0, start // block)
            engine.run.begin(ctx)
            label = torch.arange(start, start + block).float().repeat_interleave(rows * rows)[None, :, None, None].expand(-1, -1, HEADS, 24)
            engine.run.policy("p").attend(0, torch.zeros_like(label), torch.zeros_like(label), label, ctx)
            engine.run.end()
    assert watch.seen > 4


def test_a_policy_that_called_history_recent_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    true = KeyRows.spans
    monkeypatch.setattr(KeyRows, "spans", lambda rows, recent: true(rows, recent + 1))
    with pytest.raises(AssertionError):
        test_policies_tell_sink_recent_history_and_own_rows(FULL)
