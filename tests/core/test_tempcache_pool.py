"""Who joins whom, who goes, and keys at their extremes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from core.tempcache_tools import Synthetic, distinct, pool_of, settings_of, tc
from fastar_pack.fastar_core.errors import ConfigError
from fastar_pack.fastar_core.noise import seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.tempcache.features import QueryMoment
from fastar_pack.fastar_core.tempcache.pool import HistoryPool, Ingested
from fastar_pack.fastar_core.tempcache.settings import TempCacheSettings

pytestmark = pytest.mark.cpu
S = 6


def put(pool: HistoryPool, keys: list[Tensor], frame: int = 0, usage: list[float] | None = None) -> Ingested:
    k = torch.stack(keys, 1)[None]
    use = torch.tensor(usage or [0.0] * len(keys))[None, None]
    return pool.ingest(k, k + frame, frame, use, None)


# -- joining ---------------------------------------------------------------------------------------------------------


def test_a_token_joins_at_the_threshold_and_not_below() -> None:
    pool = pool_of(settings_of(threshold=0.9), 18)
    put(pool, [distinct(2 * i) for i in range(S)])
    near, far = 0.95 * distinct(0) + 0.2 * distinct(1), 0.6 * distinct(0) + 0.8 * distinct(1)
    went = put(pool, [near, distinct(4), distinct(13), distinct(15), distinct(17), far], 1)
    assert went.merged[0, 0].tolist() == [True, True, False, False, False, False]
    assert went.slot[0, 0].tolist() == [0, 2, 6, 7, 8, 9]
    assert pool.count[0, 0, :11].tolist() == [2, 1, 2, 1, 1, 1, 1, 1, 1, 1, 0]
    assert went.similarity[0, 0, 5] == pytest.approx(0.6, abs=1e-6)


def test_several_tokens_join_one_group_at_once() -> None:
    pool = pool_of(settings_of(threshold=0.9), 18)
    put(pool, [distinct(i) for i in range(S)])
    went = put(pool, [distinct(0)] * 4 + [distinct(9), distinct(1)], 1)
    assert went.slot[0, 0].tolist() == [0, 0, 0, 0, 6, 1]
    assert pool.count[0, 0, 0] == 5
    assert pool.cell[0, 0, :2].tolist() == [3, 5]
    assert pool.values.read()[0, :, 0].tolist() == ((5 * distinct(0) + 4) / 5).tolist()


def test_a_threshold_above_one_switches_merging_off() -> None:
    pool = pool_of(settings_of(threshold=1.01), 18)
    same = [distinct(0)] * S
    for frame in range(4):
        went = put(pool, same, frame, [0.1 * frame] * S)
        assert not went.merged.any()
    assert pool.count[0, 0].tolist() == [1] * 18
    assert sorted(pool.frame[0, 0].tolist()) == [1] * S + [2] * S + [3] * S


# -- the quota -------------------------------------------------------------------------------------------------------


def test_a_full_pool_absorbs_exactly_its_quota() -> None:
    """As many tokens as lack a free row join, the best of them; one more or less would be another pool."""
    pool = pool_of(settings_of(threshold=0.99, floor=0.3), 8)
    put(pool, [distinct(2 * i) for i in range(S)])
    angles = [0.5, 0.2, 0.9, 0.4, 0.7, 0.3]
    went = put(pool, [torch.cos(torch.tensor(a)) * distinct(2 * i) + torch.sin(torch.tensor(a)) * distinct(2 * i + 1)
                      for i, a in enumerate(angles)], 1)
    assert went.merged[0, 0].tolist() == [True, True, False, True, False, True], "the 4 smallest angles; 2 rows were free"
    assert not went.evicted.any()
    assert went.slot[0, 0].tolist() == [0, 1, 6, 3, 7, 5]


def test_below_the_floor_the_least_used_rows_go() -> None:
    pool = pool_of(settings_of(threshold=0.99, floor=0.5), 8)
    put(pool, [distinct(i) for i in range(S)], 0, [0.5, 0.1, 0.4, 0.05, 0.3, 0.2])
    went = put(pool, [distinct(10 + i) for i in range(S)], 1, [0.9] * S)
    assert not went.merged.any()
    assert went.slot[0, 0].tolist() == [6, 7, 3, 1, 5, 4], "free rows, then by use"
    assert went.evicted[0, 0].nonzero().flatten().tolist() == [1, 3, 4, 5]
    assert pool.frame[0, 0].tolist() == [0, 1, 0, 1, 1, 1, 1, 1]


def test_a_row_that_is_joined_does_not_go_in_the_same_moment() -> None:
    pool = pool_of(settings_of(threshold=0.99, floor=0.5), 6)
    put(pool, [distinct(i) for i in range(S)], 0, [0.5, 0.0, 0.4, 0.3, 0.2, 0.1])
    went = put(pool, [distinct(1), *[distinct(10 + i) for i in range(5)]], 1, [0.9] * S)
    assert went.slot[0, 0, 0] == 1
    assert pool.count[0, 0].tolist() == [1, 2, 1, 1, 1, 1]
    assert sorted(went.slot[0, 0, 1:].tolist()) == [0, 2, 3, 4, 5]


def test_use_is_a_moving_average_of_occupied_rows() -> None:
    pool = pool_of(settings_of(usage_decay=0.75), 8)
    put(pool, [distinct(i) for i in range(S)], 0, [0.4] * S)
    pool.use(torch.full((1, 1, 8), 0.8))
    assert pool.usage[0, 0].tolist() == pytest.approx([0.5] * S + [0.0, 0.0])
    put(pool, [distinct(i) for i in range(S)], 1, [0.9, 0.1, 0.9, 0.1, 0.9, 0.1])
    assert pool.usage[0, 0, :S].tolist() == pytest.approx([0.9, 0.5] * 3), "a group is used as much as its best used member"


@pytest.mark.parametrize("shared", [True, False])
def test_rows_in_use_stand_in_front_and_counts_add_up(shared: bool) -> None:
    run = Synthetic(tc(budget_frames=8, threshold=0.85, floor=0.4, shared=shared), batch=2)
    evicted = torch.zeros(2, 1 if shared else 2, dtype=torch.int64)
    for start in range(0, 60, 3):
        lost: list[Tensor] = []
        if start:
            pool = run.pool()
            plain = pool.ingest

            def watched(*args: Any, plain: Any = plain, pool: Any = pool, lost: Any = lost) -> Ingested:
                before = pool.count
                went = plain(*args)
                if went.fold is not None:  # members move before any row goes
                    moved = torch.gather(before, 2, went.fold.victim) * went.fold.done
                    before = before.scatter_add(2, went.fold.target, moved).scatter_add(2, went.fold.victim, -moved)
                lost.append(before.masked_fill(~went.evicted, 0).sum(-1))
                return went

            pool.ingest = watched  # type: ignore[method-assign]
        run.go(start + 3, start)
        if start:
            pool.ingest = plain  # type: ignore[method-assign]
        evicted += sum(lost) if lost else 0
        used = run.pool().count > 0
        assert torch.equal(used.long().sort(-1, descending=True).values, used.long())
        history = run.policy.ledger.end - len(run.policy.ledger.frames)
        assert torch.equal(run.pool().count.sum(-1) + evicted, torch.full_like(evicted, history * S))
    assert (evicted > 0).all()


# -- keys at their extremes ------------------------------------------------------------------------------------------


def frames(kind: str) -> Any:
    def make(phase: str, frame: int, layer: int) -> Tensor:
        q, k, v = seeded_normal(31 + 100 * frame + layer, (3, 1, S, 2, 24))
        if kind == "identical":
            k = torch.ones_like(k)
        elif kind == "zero":
            k = torch.zeros_like(k)
        elif kind == "offset":
            k = k + 100.0
        elif kind == "huge":
            k = 1e4 * k
        return torch.stack([q, k, v])
    return make


@pytest.mark.parametrize("changes", [{}, {"space": "pre", "representative": "last"}, {"search": "lsh"}, {"search": "int8"},
                                     {"similarity": "logit"}, {"history_type": "int8"}, {"shared": False, "representative": "medoid"}])
@pytest.mark.parametrize("kind", ["identical", "distinct", "zero", "offset", "huge"])
def test_extreme_keys_give_finite_and_sane_outputs(kind: str, changes: dict[str, Any]) -> None:
    run = Synthetic(tc(budget_frames=7, **changes), make=frames(kind), layers=1).go(36)
    assert all(torch.isfinite(out).all() for out in run.outputs)
    lowest, highest = (torch.stack([run.qkv("clean", f, 1, 0)[2] for f in range(36)]).aminmax())
    assert all(lowest <= out.min() and out.max() <= highest for out in run.outputs[1::2]), "a mean of values"
    assert int(run.pool().count.max()) >= 1


@pytest.mark.parametrize("kind", ["identical", "zero"])
def test_keys_that_say_nothing_give_the_plain_mean_of_all_values(kind: str) -> None:
    """Equal keys before RoPE at one position: every token of the past has the same weight, merged or not."""
    run = Synthetic(tc(budget_frames=60, threshold=0.5 if kind == "identical" else 0.9), make=frames(kind), layers=1,
                    scale_t=0, scale_yx=0)
    run.go(30)
    out = run.call("denoise", 30, 3)[0]
    values = torch.cat([run.qkv("clean", f, 1, 0)[2] for f in range(30)] + [run.qkv("denoise", 30, 3, 0)[2]], 1)
    assert (out - values.mean(1, keepdim=True)).abs().max() <= 1e-5
    assert int(run.pool().count.max()) > 1 if kind == "identical" else int(run.pool().count.max()) == 1


def test_an_offset_of_a_hundred_does_not_blur_logit_distances() -> None:
    """Shifting all keys by one vector changes no distance: the same tokens join the same groups."""
    plain = frames("distinct")

    def slots(shift: float) -> list[list[int]]:
        pool, moment = pool_of(settings_of(similarity="logit", threshold=0.2, floor=-1.0), 24), QueryMoment()
        moment.take(moment.observe(seeded_normal(5, (1, 2, 64, 24))))
        found = []
        for frame in range(12):
            k = plain("clean", frame % 5, 0)[1].transpose(1, 2) + 0.05 * seeded_normal(frame, (1, 2, S, 24)) + shift
            found.append(pool.ingest(k, k, frame, torch.zeros(1, 1, S), moment).slot[0, 0].tolist())
        return found

    assert slots(0.0) == slots(100.0)
    assert len({tuple(s) for s in slots(0.0)}) > 3


@pytest.mark.parametrize("change", [{"space": "sideways"}, {"bits": 0}, {"tables": 0}, {"recent_frames": -1}, {"usage_decay": 1.0},
                                    {"search": "faiss"}])
def test_settings_that_do_not_exist_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TempCacheSettings(**change)


def test_settings_survive_a_copy_as_themselves() -> None:
    settings = tc(budget_frames=9)
    assert copy.deepcopy(settings) is settings
    assert copy.deepcopy(settings.tempcache) is settings.tempcache
    assert isinstance(settings, PolicySettings)
