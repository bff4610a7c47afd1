"""Where every frame is: pinned, in the history or evicted, each exactly once; memory and work that stay flat; re-indexing."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from core.tempcache_tools import Followed, Synthetic, tc
from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.tempcache.ledger import Ledger

pytestmark = pytest.mark.cpu


def commit(ledger: Ledger, start: int, count: int) -> list[int]:
    """What a policy does with a move; returns the frames that leave."""
    move = ledger.plan(FwdCtx("clean", start, count, (0.0,) * count, (0.0,) * count, 1, 1))
    assert move.before == ledger.frames
    assert [move.after[s] for s in move.changed] == [f for f in move.after if start <= f < start + count]
    unchanged = [s for s in range(len(move.before)) if s not in move.changed]
    assert all(move.before[s] == move.after[s] for s in unchanged)
    ledger.frames, ledger.end = move.after, start + count
    return move.leaving


@pytest.mark.parametrize(("block", "prefix", "short"), [*product((1, 3, 4), (0, 1, 2, 5), (0, 1))])
@pytest.mark.parametrize("sink", [0, 1, 3])
def test_every_frame_is_in_exactly_one_place(block: int, prefix: int, short: int, sink: int) -> None:
    for recent, first in product(range(7), (0, 12)):
        ledger = Ledger(sink, recent)
        ledger.restart(first)
        calls = [min(block, prefix - s) for s in range(0, prefix, block)] + [block] * 9 + [1] * (short if block > 1 else 0)
        history: list[int] = []
        end = first
        for count in calls:
            history += commit(ledger, end, count)
            end += count
            assert sorted(history + ledger.frames) == list(range(first, end)), (recent, first, count)
            assert history == sorted(history), "frames enter the history in order of age"
            assert ledger.frames[:sink] == list(range(first, min(end, first + sink))), "the sink never moves"
            newest = list(range(max(first + sink, end - recent), end))
            assert sorted(ledger.frames[sink:]) == newest
            assert len(ledger.frames) <= ledger.slots


def test_a_ledger_that_drops_the_newest_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "slots", property(lambda self: self.sink + self.recent - 1))
    with pytest.raises((AssertionError, ValueError)):
        test_every_frame_is_in_exactly_one_place(3, 0, 0, 1)


@pytest.mark.parametrize(("block", "recent", "sink"), [*product((1, 3, 4), (0, 2, 6), (0, 2))])
def test_every_token_is_pinned_or_in_one_group_or_evicted(block: int, recent: int, sink: int) -> None:
    run = Followed(tc(sink=sink, recent_frames=recent, budget_frames=sink + recent + 3, threshold=0.85, floor=0.4), 40, block).go(37)
    frames = run.policy.ledger.frames
    members = [m for (layer, _, _, _), listed in run.members.items() if not layer for m in listed]
    assert len(set(members)) == len(members), "no token is in two groups"
    assert {f for f, _ in members}.isdisjoint(frames)
    assert frames[:sink] == list(range(sink))
    counts = {slot: len(m) for (layer, _, _, slot), m in run.members.items() if not layer}
    assert run.pool().count[0, 0].tolist() == [counts.get(s, 0) for s in range(run.pool().capacity)]
    newest = {slot: max(m) for (layer, _, _, slot), m in run.members.items() if not layer}
    for slot, (frame, cell) in newest.items():
        assert (int(run.pool().frame[0, 0, slot]), int(run.pool().cell[0, 0, slot])) == (frame, cell)
    told = run.blocks()
    assert sum(b["left_recent"] for b in told) == 37 - len(frames)
    assert sum(b["merged"][0] + b["opened"][0] for b in told) == 6 * (37 - len(frames))
    assert sum(b["evicted"][0] for b in told) == sum(1 for at in run.evictions if not at[0])


# -- flat ------------------------------------------------------------------------------------------------------------


def long_run(settings: PolicySettings, blocks: int) -> Synthetic:
    return Synthetic(settings, 3 * blocks, 3, rows=1, cols=2, heads=1, dim=12, layers=1).go(3 * blocks)


def slope(values: list[float]) -> float:
    """Change per block of a straight line through the values."""
    x = torch.arange(len(values), dtype=torch.float64)
    y = torch.tensor(values, dtype=torch.float64)
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


@pytest.mark.parametrize("changes", [{}, {"threshold": 1.01}, {"space": "pre", "reindex_span": 18, "representative": "last"}])
def test_bytes_and_pairs_are_flat_over_400_blocks(changes: dict[str, Any]) -> None:
    run = long_run(tc(budget_frames=9, **changes), 410)
    told = run.blocks()[10:]
    assert len(told) == 400
    tables = 12 * run.policy.ledger.end  # rotary angles of every frame, not rows: 12 numbers of 4 bytes
    assert slope([b["bytes"] for b in told]) == 0
    assert slope([b["rows"][0] for b in told]) == 0
    assert told[-1]["rows"] == [2 * 9]
    assert told[-1]["density"] == pytest.approx((9 + 3) / (1230 + 3))
    assert run.run.peak_bytes - run.run.bytes() < 4 * tables + 2**12
    assert sum(b["merged"][0] + b["evicted"][0] + b["folded"][0] for b in told) == 2 * 3 * 400, "a full pool takes in what it gives up"


def test_a_cache_that_grows_would_be_seen() -> None:
    told = long_run(tc(budget_frames=200, threshold=1.01), 60).blocks()[10:]
    assert slope([b["rows"][0] for b in told]) == pytest.approx(6)


# -- re-indexing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("span", "recent"), [(18, 3), (5, 0), (6, 6), (40, 3)])
def test_no_distance_exceeds_the_span_in_1100_blocks(span: int, recent: int) -> None:
    policy = Synthetic(tc(budget_frames=9 + recent, recent_frames=recent, reindex_span=span), 3303)
    policy.call("denoise", 0, 3)
    place = policy.policy.position
    for start in [*range(0, 60, 3), *range(60, 3300, 90), 3297]:
        frames = torch.arange(start + 3)
        found = place(frames, start)
        distance = found[start] - found
        assert int(distance.max()) <= span
        assert int(found.min()) >= 0, "and no place is below zero"
        assert (found.diff() >= 0).all(), "older frames stay behind newer ones"
        near = frames >= start - min(recent, span)
        assert torch.equal(distance[near], (start - frames)[near]), "recent and own frames stand at true distances"
        if start <= span:
            assert torch.equal(distance, start - frames)
        else:
            assert int(distance[0]) == span, "the whole span is used"
    off = Synthetic(tc(budget_frames=9))
    off.call("denoise", 0, 3)
    assert off.policy.position(torch.arange(3303), 3300).tolist() == list(range(3303)), "off = true positions"


@pytest.mark.parametrize("space", ["post", "pre"])
def test_what_attention_sees_stands_where_re_indexing_says(space: str) -> None:
    """Rotated keys in the buffer are the raw ones at the squeezed places, sink and history alike."""
    run = Synthetic(tc(sink=2, budget_frames=30, threshold=1.01, reindex_span=9, space=space)).go(24)
    policy, store, rotary = run.policy, run.store(), run.policy.rotary
    keys, _, _ = store.visible(len(policy.ledger.frames), None, policy.tables)
    frames = [*policy.ledger.frames, *run.pool().frame[0, 0, :store.bound:6].tolist()]
    assert len(frames) == 24
    for i, frame in enumerate(frames):
        raw = run.qkv("clean", frame, 1, 0)[1]
        at = int(policy.position(torch.tensor([frame]), 24))
        wanted = rotary.rotate(raw, [at]).transpose(1, 2)
        assert (keys[:, :, 6 * i:6 * i + 6] - wanted).abs().max() <= 1e-5
        assert 0 <= 9 - at <= 9
        if at != frame:
            assert (keys[:, :, 6 * i:6 * i + 6] - rotary.rotate(raw, [frame]).transpose(1, 2)).abs().max() > 1e-2


@pytest.mark.parametrize("changes", [{}, {"space": "pre"}, {"history_type": "int8"}])
def test_a_span_longer_than_the_rollout_changes_nothing(changes: dict[str, Any]) -> None:
    base = {"budget_frames": 9, "threshold": 0.8, **changes}
    off, wide = Synthetic(tc(**base)).go(42), Synthetic(tc(reindex_span=60, **base)).go(42)
    assert max((a - b).abs().max() for a, b in zip(off.outputs, wide.outputs)) <= 2e-5
    narrow = Synthetic(tc(reindex_span=10, **base)).go(42)
    assert max((a - b).abs().max() for a, b in zip(off.outputs, narrow.outputs)) > 1e-2
