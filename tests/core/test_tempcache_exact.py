"""Merging off and room for everything: TempCache is `full`, to the bit where rows stand in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from core.engine_tools import FULL, Rollout
from core.tempcache_tools import Synthetic, tc
from fastar_pack.fastar_core.policies import PolicySettings

pytestmark = pytest.mark.cpu
SHAPE = (1, 4, 18, 4, 6)
TOTAL = SHAPE[2]
FAR = 1e-3
WAYS: list[dict[str, Any]] = [
    {}, {"space": "pre"}, {"representative": "last"}, {"representative": "medoid"}, {"shared": False}, {"search": "int8"},
    {"search": "lsh"}, {"similarity": "logit"}, {"space": "pre", "representative": "last", "similarity": "logit"},
]


def all_kept(**changes: Any) -> PolicySettings:
    return tc(budget_frames=TOTAL + 4, threshold=1.01, **changes)


@pytest.fixture(scope="module")
def full() -> torch.Tensor:
    return Rollout(SHAPE, 3, FULL).run()


def difference(settings: PolicySettings, full: torch.Tensor) -> float:
    """Root mean square difference of a whole rollout relative to the standard deviation of its output."""
    out = Rollout(SHAPE, 3, settings).run()
    return float((out - full).square().mean().sqrt() / full.std())


@pytest.mark.parametrize("changes", [{}, {"space": "pre"}, {"shared": False}, {"history_type": "int8"}, {"similarity": "logit"}])
def test_a_recent_range_as_long_as_the_rollout_is_full_to_the_bit(changes: dict[str, Any], full: torch.Tensor) -> None:
    settings = tc(sink=0, budget_frames=TOTAL + 1, recent_frames=TOTAL, threshold=1.01, **changes)
    assert torch.equal(Rollout(SHAPE, 3, settings).run(), full)


@pytest.mark.parametrize("space", ["post", "pre"])
def test_history_rows_in_the_order_of_frames_are_full_to_the_bit(space: str, full: torch.Tensor) -> None:
    """Without sink and recent range every frame enters the history at its own clean pass, so rows follow frames."""
    settings = tc(sink=0, budget_frames=TOTAL + 1, recent_frames=0, threshold=1.01, space=space)
    out = Rollout(SHAPE, 3, settings).run()
    assert torch.equal(out, full)


@pytest.mark.parametrize("changes", WAYS)
@pytest.mark.parametrize("recent", [0, 3, 4])
def test_rows_in_another_order_are_full_to_rounding(changes: dict[str, Any], recent: int, full: torch.Tensor) -> None:
    assert difference(all_kept(recent_frames=recent, **changes), full) <= 1e-6


def test_eight_bits_are_close_and_not_equal(full: torch.Tensor) -> None:
    assert 1e-7 < difference(all_kept(history_type="int8"), full) <= 1e-4


@pytest.mark.parametrize("settings", [tc(budget_frames=8, threshold=1.01), tc(budget_frames=TOTAL + 4, threshold=0.5)])
def test_merging_or_too_little_room_shows(settings: PolicySettings, full: torch.Tensor) -> None:
    assert difference(settings, full) > FAR


def test_heads_without_history_look_at_pinned_and_own_frames_only() -> None:
    """Each head equals a dense attention over what it may see: everything, or sink, recent and own frames."""
    quiet = ((0, 1), (1, 0), (1, 1))
    run = Synthetic(tc(sink=2, budget_frames=60, threshold=1.01, quiet_heads=quiet)).go(24)
    rotary = run.policy.rotary
    for layer, stores in ((0, 2), (1, 1)):
        assert len(run.policy.stores(layer)) == stores
        q, own_k, own_v = run.qkv("denoise", 24, 3, layer)
        past = [run.qkv("clean", f, 1, layer) for f in range(24)]
        got = run.call("denoise", 24, 3)[layer]
        for head in range(2):
            seen = [0, 1, 21, 22, 23] if (layer, head) in quiet else list(range(24))
            k = torch.cat([rotary.rotate(past[f][1], [f]) for f in seen] + [rotary.rotate(own_k, [24, 25, 26])], 1)[0, :, head]
            v = torch.cat([past[f][2] for f in seen] + [own_v], 1)[0, :, head]
            scores = rotary.rotate(q, [24, 25, 26])[0, :, head] @ k.T / run.dim**0.5
            assert (got[0, :, head] - scores.softmax(-1) @ v).abs().max() <= 1e-5
    bare = [store for layer in (0, 1) for store in run.policy.stores(layer) if store.pool is None]
    assert [store.keys.shape[1:3] for store in bare] == [(1, 48), (2, 48)], "5 pinned and 3 own frames of 6 rows, no history"
    assert (Synthetic(tc(sink=2, budget_frames=60, threshold=1.01)).go(27).outputs[-2] - run.outputs[-1]).abs().max() > FAR


@pytest.mark.parametrize("changes", [{}, {"reindex_span": 9}, {"space": "pre"}])
def test_pinned_keys_of_quiet_heads_stand_where_those_of_others_do(changes: dict[str, Any]) -> None:
    """Quiet heads equal a cache whose history is as good as empty for them."""
    all_quiet = tuple((layer, head) for layer in range(2) for head in range(2))
    run = Synthetic(tc(sink=2, budget_frames=60, threshold=1.01, quiet_heads=all_quiet, **changes)).go(24)
    frames, start = run.policy.ledger.frames, 24
    places = run.policy.position(torch.tensor([*frames, 24, 25, 26]), start).tolist()
    rotary = run.policy.rotary
    q, k, v = run.qkv("denoise", start, 3, 0)
    past = [run.qkv("clean", f, 1, 0) for f in frames]
    keys = torch.cat([rotary.rotate(p[1], [at]) for p, at in zip(past, places)] + [rotary.rotate(k, places[-3:])], 1)
    values = torch.cat([p[2] for p in past] + [v], 1)
    scores = torch.einsum("bqhd,bkhd->bhqk", rotary.rotate(q, places[-3:]), keys) / run.dim**0.5
    wanted = (scores.softmax(-1) @ values.transpose(1, 2)).transpose(1, 2)
    assert (run.call("denoise", start, 3)[0] - wanted).abs().max() <= 1e-5
