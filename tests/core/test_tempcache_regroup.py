"""A full pool makes room by joining little used groups, when that costs less than forcing new tokens into poor matches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastar_pack.fastar_core.tempcache.matching import NO_MATCH
from fastar_pack.fastar_core.tempcache.pool import HistoryPool
from fastar_pack.fastar_core.tempcache.regroup import choose_folds, closest_pairs, highest
from fastar_pack.fastar_core.tempcache.rows import MeanRows
from fastar_pack.fastar_core.tempcache.settings import TempCacheSettings

pytestmark = pytest.mark.cpu
S, DIM = 4, 16
BASE = TempCacheSettings(threshold=0.95, floor=0.3, neighbourhood=0)


def make_pool(settings: TempCacheSettings, capacity: int) -> HistoryPool:
    blank = torch.zeros(1, 1, capacity, DIM)
    return HistoryPool(MeanRows(blank.clone()), MeanRows(blank.clone()), blank, 2, 2, settings)


def axes(*numbers: int, tilt: float = 0.0) -> torch.Tensor:
    """Keys [1, 1, n, DIM] along the named axes, leaning a little towards the last one."""
    keys = torch.zeros(1, 1, len(numbers), DIM)
    for row, number in enumerate(numbers):
        keys[0, 0, row, number] = 1
    keys[..., -1] = tilt
    return keys


def filled(settings: TempCacheSettings) -> HistoryPool:
    """Eight rows, full: four along axes 0..3, and four that nearly repeat them."""
    pool = make_pool(settings, 2 * S)
    pool.ingest(axes(0, 1, 2, 3), axes(0, 1, 2, 3), 0, torch.full((1, 1, S), 0.1), None)
    pool.ingest(axes(0, 1, 2, 3, tilt=0.5), axes(0, 1, 2, 3), 1, torch.full((1, 1, S), 0.2), None)
    assert (pool.count == 1).all()
    return pool


@pytest.mark.parametrize("regroup", [True, False])
def test_new_tokens_get_rows_of_their_own(regroup: bool) -> None:
    pool = filled(replace(BASE, regroup=regroup, floor=-1.0))
    went = pool.ingest(axes(1, 2, 3, 4), axes(1, 2, 3, 4), 2, torch.full((1, 1, S), 0.1), None)
    new = pool.keys.read()[0, 0]
    assert bool((new[:, 4] == 1).any()) == regroup, "without it a full pool blurs the best match there is"
    assert int(pool.count.sum()) == 3 * S
    assert int(went.counts()[3]) == int(regroup), "a quarter of a frame's rows may be folded per frame"


def test_members_values_and_counts_move_together() -> None:
    pool = filled(BASE)
    pool.values.write(torch.arange(2 * S)[None, None],
                      torch.arange(2.0 * S)[None, None, :, None].expand(1, 1, -1, DIM))
    went = pool.ingest(axes(1, 2, 3, 4), torch.full((1, 1, S, DIM), 100.0), 2, torch.full((1, 1, S), 0.1), None)
    fold = went.fold
    assert fold is not None
    assert int(fold.done.sum()) == 1
    victim, target = int(fold.victim[fold.done]), int(fold.target[fold.done])
    assert victim == target + S, "row i + 4, opened later, is the near repeat of row i"
    assert int(pool.count[0, 0, target]) == 2
    assert torch.allclose(pool.values.read()[0, 0, target], torch.full((DIM,), (victim + target) / 2))
    assert torch.allclose(pool.values.read()[0, 0, victim], torch.full((DIM,), 100.0)), "the new token took the row"
    assert pool.usage[0, 0, target] == pytest.approx(0.3), "a joint group is used as much as both were"
    assert int(fold.remap(torch.tensor([[[victim]]]), 2 * S)) == target


def test_rows_remember_the_row_most_like_them() -> None:
    pool = filled(BASE)
    assert pool.near_row[0, 0, S:].tolist() == [0, 1, 2, 3]
    assert pool.near_score[0, 0, S:].tolist() == pytest.approx([1.25**-0.5] * S)
    assert pool.near_score[0, 0, 1:S].tolist() == [0.0] * (S - 1), "in an empty pool, the token to the left or above"
    assert pool.near_score[0, 0, 0] == NO_MATCH


def test_the_closest_pairs_come_first_and_dead_ones_not_at_all() -> None:
    count = torch.tensor([[[1, 1, 0, 2, 1, 1]]])
    near = torch.tensor([[[3, 0, 1, 2, 4, 0]]])  # row 3 points at a free row, row 4 at itself
    likeness = torch.tensor([[[0.5, 0.9, 0.99, 0.98, 0.97, 0.9]]])
    victim, target = closest_pairs(near, likeness, count, 3)
    assert victim[0, 0].tolist() == [1, 5, 0], "ties: the lower row"
    assert target[0, 0].tolist() == [0, 0, 3]


def test_ties_are_ranked_the_same_everywhere() -> None:
    """As a stable sort ranks them, for every kind of number; a plain top-k may swap equal ones."""
    values = torch.tensor([0.5, -0.0, 0.0, 0.5, float("inf"), -1.0, -float("inf"), 0.5, -1.0, 1e-40, -1e-40, 3e38]).repeat(2, 3, 5)
    wanted = values.argsort(dim=-1, descending=True, stable=True)
    assert torch.equal(highest(values, values.shape[-1]), wanted)
    assert torch.equal(highest(values, 7), wanted[..., :7])


def test_a_row_takes_part_in_one_direction() -> None:
    """5 into 4 and 4 into 3 would move members into a row that leaves; the likelier pair is made, whichever way round."""
    score, free = torch.zeros(1, 1, 4), torch.zeros(1, 1, 1, dtype=torch.int64)
    victim, target = torch.tensor([[[5, 4, 7]]]), torch.tensor([[[4, 3, 3]]])
    for likeness, wanted in (([0.9, 0.8, 0.7], [5, 7]), ([0.8, 0.9, 0.7], [4, 7])):
        fold = choose_folds(score, victim, target, torch.tensor([[likeness]]), free, 0.95, 0.0)
        assert fold.victim[fold.done].tolist() == wanted
        assert not set(fold.victim[fold.done].tolist()) & set(fold.target[fold.done].tolist())


def test_a_likeness_that_no_longer_holds_makes_no_pair() -> None:
    """What is remembered only orders the pairs; the keys as they are decide."""
    pool = filled(BASE)
    pool.keys.write(torch.tensor([[[S + 2]]]), axes(9))
    pool.near_score[0, 0, S + 2] = 0.99
    went = pool.ingest(axes(1, 2, 3, 4), axes(1, 2, 3, 4), 2, torch.full((1, 1, S), 0.1), None)
    assert went.fold is not None
    assert not went.fold.done.any()
    assert pool.near_score[0, 0, S + 2] <= 0.0, "and is not offered first again"


def test_what_points_at_a_row_that_moved_follows_it() -> None:
    """Row 4 joins row 0; another row's partner and a later frame's match stood in row 4, where a stranger lives now."""
    pool = filled(BASE)
    pool.near_row[0, 0, S + 1] = S
    first, second = axes(1, 2, 3, 4), axes(0, 1, 2, 3, tilt=0.5)
    index = pool.open_index(None, [first, second])
    assert int(index.best(1)[1][0, 0, 0]) == S
    went = pool.ingest(first, first, 2, torch.full((1, 1, S), 0.1), None, index, 0)
    assert went.fold is not None
    assert went.fold.victim[went.fold.done].tolist() == [S]
    assert went.fold.target[went.fold.done].tolist() == [0]
    assert int(pool.near_row[0, 0, S + 1]) == 0
    score, slot = index.best(1)
    assert int(slot[0, 0, 0]) == 0
    assert score[0, 0, 0] > 0.95


def test_roll_back_restores_what_was_folded() -> None:
    pool = filled(BASE)
    before = [t.clone() for t in pool.tensors()]
    pool.begin_undo()
    pool.ingest(axes(2, 3, 4, 5), axes(2, 3, 4, 5), 2, torch.full((1, 1, S), 0.1), None)
    assert any(not torch.equal(a, b) for a, b in zip(before, pool.tensors()))
    pool.roll_back()
    assert all(torch.equal(a, b) for a, b in zip(before, pool.tensors()))


def test_only_the_cheaper_union_is_made() -> None:
    score = torch.tensor([[[0.2, 0.9, 0.5, 0.99]]])
    victim, target = torch.tensor([[[0, 1]]]), torch.tensor([[[6, 7]]])
    free = torch.zeros(1, 1, 1, dtype=torch.int64)
    for likeness, wanted in (([0.4, 0.6], [1, 0]), ([0.1, 0.1], [0, 0]), ([0.3, 0.8], [1, 0]), ([0.7, 0.8], [1, 1])):
        fold = choose_folds(score, victim, target, torch.tensor([[likeness]]), free, 0.95, 0.0)
        assert fold.done[0, 0].int().tolist() == wanted
    assert not choose_folds(score, victim, target, torch.tensor([[[0.9, 0.9]]]), free + 3, 0.95, 0.0).done.any(), "free rows come first"


def test_a_joint_group_stands_where_its_newest_member_stood() -> None:
    """Frame and cell of one token; frame of one and cell of another would be a place that nobody had."""
    pool = filled(BASE)
    pool.cell[0, 0, S] = 3
    went = pool.ingest(axes(1, 2, 3, 4), axes(1, 2, 3, 4), 2, torch.full((1, 1, S), 0.1), None)
    assert went.fold is not None
    assert went.fold.target[went.fold.done].tolist() == [0]
    assert 0 not in went.slot.flatten().tolist(), "no token came to it"
    assert (int(pool.frame[0, 0, 0]), int(pool.cell[0, 0, 0])) == (1, 3)


def test_a_row_that_changes_hands_forgets_its_correction() -> None:
    """Also where nothing is measured afterwards, as when a restart takes pinned frames in."""
    pool = filled(replace(BASE, regroup=False, floor=0.9))
    pool.correction += 0.3
    went = pool.ingest(axes(4, 5, 6, 7), axes(4, 5, 6, 7), 2, torch.full((1, 1, S), 0.9), None)
    assert went.evicted.sum() == S
    assert pool.correction[went.opened].tolist() == [0.0] * S
    assert pool.correction[~went.opened].tolist() == pytest.approx([0.3] * S)
