"""Nothing is mixed up and everything can be undone: batch rows, branches, denoise calls, roll-backs, re-indexing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.tempcache_tools import Synthetic, equal, similar_frames, state, tc
from fastar_pack.fastar_core.errors import ConfigError, GeometryError
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.tempcache.pool import HistoryPool
from fastar_pack.fastar_core.tempcache.rows import PackedRows

pytestmark = pytest.mark.cpu
MERGING: dict[str, Any] = {"budget_frames": 7, "threshold": 0.8, "floor": 0.5}
WAYS: list[dict[str, Any]] = [
    {}, {"space": "pre"}, {"representative": "last"}, {"representative": "medoid"}, {"space": "pre", "representative": "medoid"},
    {"history_type": "int8"}, {"history_type": "int8", "space": "pre"}, {"shared": False}, {"shared": False, "representative": "last"},
    {"similarity": "logit", "threshold": 0.3, "floor": 0.1}, {"reindex_span": 9}, {"reindex_span": 9, "space": "pre"},
    {"search": "lsh", "bits": 4}, {"search": "int8"}, {"recent_frames": 0}, {"recent_frames": 4}, {"quiet_heads": ((0, 1), (1, 0))},
]
FLOATS = [torch.float32, torch.bfloat16]


def run(changes: dict[str, Any], **more: Any) -> Synthetic:
    return Synthetic(tc(**(MERGING | changes)), **more)


# -- denoise calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", WAYS)
def test_denoise_calls_leave_everything_as_it_was(changes: dict[str, Any]) -> None:
    one = run(changes).go(27)
    before = state(one.policy)
    first, again = one.call("denoise", 27, 3), one.call("denoise", 27, 3)
    assert torch.equal(first, again)
    assert equal(before, state(one.policy))
    one.call("clean", 27, 3)
    assert not equal(before, state(one.policy))


# -- roll-back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("changes", WAYS)
def test_a_block_rolled_back_and_made_again_is_the_same_to_the_bit(changes: dict[str, Any], dtype: torch.dtype) -> None:
    one = run(changes, dtype=dtype)
    totals = [0, 0]
    for start in range(0, 33, 3):
        before = state(one.policy) if start else []
        calls = [one.call("denoise", start, 3), one.call("clean", start, 3)]
        after, told = state(one.policy), one.blocks()
        one.policy.rollback(start)
        if start:
            assert equal(before, state(one.policy))
        assert [torch.equal(a, b) for a, b in zip(calls, [one.call("denoise", start, 3), one.call("clean", start, 3)])] == [True, True]
        assert equal(after, state(one.policy))
        assert one.blocks() == told, "the block is told once"
        totals = [totals[0] + sum(told[-1]["merged"]), totals[1] + sum(told[-1]["evicted"])]
    assert min(totals) > 0, "the run had merges and evictions"


def test_writing_decoded_rows_back_would_not_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedRows, "raw", lambda self, index: [self.pick(index)])
    monkeypatch.setattr(PackedRows, "restore", lambda self, index, parts: self.write(index, parts[0]))
    with pytest.raises(AssertionError):
        test_a_block_rolled_back_and_made_again_is_the_same_to_the_bit({"history_type": "int8"}, torch.float32)


def test_usage_is_part_of_what_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = HistoryPool.roll_back

    def forgetful(self: HistoryPool) -> None:
        usage = self.usage
        plain(self)
        self.usage = usage

    monkeypatch.setattr(HistoryPool, "roll_back", forgetful)
    with pytest.raises(AssertionError):
        test_a_block_rolled_back_and_made_again_is_the_same_to_the_bit({}, torch.float32)


def test_one_block_only_can_be_undone() -> None:
    one = run({}).go(24)
    with pytest.raises(GeometryError, match="can undo the block at latent frame 21"):
        one.policy.rollback(18)
    one.policy.rollback(21)
    with pytest.raises(GeometryError, match="can undo nothing"):
        one.policy.rollback(18)
    with pytest.raises(GeometryError, match="blocks must follow each other"):
        one.call("denoise", 24, 3)
    with pytest.raises(GeometryError, match="a call of 6 latent frames is longer than the 3"):
        one.call("denoise", 21, 6)
    assert one.go(27, 21).policy.ledger.end == 27


def test_the_last_block_may_be_made_anew_without_a_roll_back() -> None:
    one, other = run({}).go(24), run({}).go(24)
    one.call("clean", 21, 3)
    assert equal(state(one.policy), state(other.policy))
    assert torch.equal(one.call("denoise", 24, 3), other.call("denoise", 24, 3))


# -- rows and branches -----------------------------------------------------------------------------------------------


def rows_of(batch: int, seed: int) -> Any:
    make = similar_frames(1, 6, 2, 24, seed)
    other = similar_frames(1, 6, 2, 24, seed + 1, period=4)
    return make if batch == 1 else lambda *at: torch.cat([make(*at), other(*at)], 1)


@pytest.mark.parametrize("changes", WAYS)
def test_batch_rows_do_not_touch_each_other(changes: dict[str, Any]) -> None:
    both = run(changes, batch=2, make=rows_of(2, 3)).go(36)
    alone = [run(changes, make=rows_of(1, 3)).go(36), run(changes, make=similar_frames(1, 6, 2, 24, 4, period=4)).go(36)]
    for row, single in enumerate(alone):
        for mine, theirs in zip(both.outputs, single.outputs):
            assert (mine[:, row:row + 1] - theirs).abs().max() <= 2e-5
            assert torch.isfinite(mine).all()
    assert (both.outputs[-1][:, :1] - alone[1].outputs[-1]).abs().max() > 1e-2, "the rows differ"
    counts = [single.pool().count for single in alone]
    assert torch.equal(both.pool().count, torch.cat(counts))
    assert not torch.equal(counts[0], counts[1])


def test_branches_do_not_touch_each_other() -> None:
    both, alone = run({}), run({}).go(30)
    shifted: list[Tensor] = []
    for start in range(0, 30, 3):
        plain = both.make
        both.call("denoise", start, 3)
        both.make = similar_frames(1, 6, 2, 24, 9)
        shifted += [both.call("denoise", start, 3, "n"), both.call("clean", start, 3, "n")]
        both.make = plain
        both.call("clean", start, 3)
        del both.outputs[-3:-1]
    assert all(torch.equal(a, b) for a, b in zip(both.outputs, alone.outputs))
    other = run({}, make=similar_frames(1, 6, 2, 24, 9)).go(30)
    assert all(torch.equal(a, b) for a, b in zip(shifted, other.outputs))
    assert not torch.equal(both.outputs[-1], shifted[-1])


# -- memory that holds something else --------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", WAYS)
def test_memory_that_was_never_written_is_never_read(changes: dict[str, Any], poisoned_memory: None) -> None:
    poisoned = run(changes).go(30)
    assert all(torch.isfinite(out).all() for out in poisoned.outputs)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("changes", WAYS)
def test_free_rows_of_a_poisoned_pool_do_not_count(changes: dict[str, Any], shared: bool) -> None:
    """Whatever stands in rows that hold no group, NaN included: results do not change by a bit."""
    ways = {"budget_frames": 12, "threshold": 0.6, "shared": shared, **changes}
    one, other = (run(ways, batch=2, make=rows_of(2, 3)).go(9) for _ in range(2))
    poisoned = 0
    for layer in range(2):
        for store in other.policy.stores(layer):
            used = len(other.policy.ledger.frames) * 6 + (0 if store.packed else store.bound)
            store.keys[:, :, used:] = store.values[:, :, used:] = float("nan")
            if store.pool is None:
                continue
            free = store.pool.count == 0
            poisoned += int(free.sum())
            for rows in store.pool._wide():
                for tensor in rows.tensors():
                    worst = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
                    behind = free & (torch.arange(free.shape[2]) >= store.bound)
                    tensor.masked_fill_(behind[..., None], worst)
    assert poisoned
    one.go(30, 9)
    other.go(30, 9)
    assert all(torch.equal(a, b) for a, b in zip(one.outputs, other.outputs))
    assert all(torch.isfinite(out).all() for out in other.outputs)


def test_settings_that_do_not_fit_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="a budget of 4 latent frames leaves no room for history beside a sink of 1 and 3"):
        run({"budget_frames": 4}).call("denoise", 0, 3)
    with pytest.raises(ConfigError, match="needs its settings"):
        Synthetic(PolicySettings("tempcache")).call("denoise", 0, 3)
