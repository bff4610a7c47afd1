"""Who joins whom, who goes, and keys at their extremes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.tempcache_tools import Synthetic, pool_of, tc
from fastar_pack.fastar_core.noise import seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.tempcache.features import QueryMoment, features, similarity
from fastar_pack.fastar_core.tempcache.matching import NO_MATCH, Search, local_best, neighbour_mask
from fastar_pack.fastar_core.tempcache.pool import HistoryPool, Ingested
from fastar_pack.fastar_core.tempcache.settings import TempCacheSettings

pytestmark = pytest.mark.cpu
S = 6


def settings_of(**changes: Any) -> TempCacheSettings:
    found = tc(budget_frames=99, **changes).tempcache
    assert found is not None
    return found


def unit(angle: float, heads: int = 2, dim: int = 24) -> Tensor:
    """A key [heads, dim] whose cosine with unit(0) is that of the angle."""
    key = torch.zeros(heads, dim)
    key[:, 0], key[:, 1] = torch.cos(torch.tensor(angle)), torch.sin(torch.tensor(angle))
    return key


def distinct(number: int, heads: int = 2, dim: int = 24) -> Tensor:
    key = torch.zeros(heads, dim)
    key[:, number % dim] = 1
    return key


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
    run = Synthetic(tc(budget_frames=60, threshold=0.5 if kind == "identical" else 0.9), make=frames(kind), layers=1, scale_t=0)
    run.rope.__dict__["scales"] = (0.0, 0.0, 0.0)
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


# -- similarity and search -------------------------------------------------------------------------------------------


def test_the_logit_distance_is_the_rms_difference_of_logits() -> None:
    q, k = seeded_normal(1, (1, 2, 500, 24)), seeded_normal(2, (1, 2, 9, 24))
    moment = QueryMoment()
    moment.take(moment.observe(q))
    for shared in (False, True):
        x = features(k, moment, shared)
        logits = q @ k.transpose(-1, -2) / 24**0.5
        rms = (logits[..., :, None] - logits[..., None, :]).square().mean(2).sqrt()
        wanted = rms.square().mean(1, keepdim=True).sqrt() if shared else rms
        assert ((1 - similarity(x, x, True)) - wanted).abs().max() <= 2e-3
        assert ((1 - similarity(features(k, None, shared), x, False)) - wanted).abs().max() > 0.1


def test_the_stated_bound_of_the_output_error_holds() -> None:
    """If every logit of a group is within delta of its representative's: |error| <= (e^(2 delta) - 1) sum w |v - o|."""
    slack = []
    for seed in range(20):
        q, v = seeded_normal(seed, (24,)), seeded_normal(50 + seed, (30, 24))
        centres = seeded_normal(80 + seed, (5, 24))
        k = centres.repeat_interleave(6, 0) + 0.1 * seeded_normal(90 + seed, (30, 24))
        logits, means = k @ q / 24**0.5, centres @ q / 24**0.5
        delta = float((logits - means.repeat_interleave(6)).abs().max())
        weights = logits.softmax(0)
        out = weights @ v
        merged = (means + torch.tensor(6.0).log()).softmax(0) @ v.unflatten(0, (5, 6)).mean(1)
        bound = float((torch.tensor(2 * delta).exp() - 1) * (weights * (v - out).norm(dim=1)).sum())
        error = float((merged - out).norm())
        assert error <= bound
        slack.append(error / bound)
    assert max(slack) > 0.02, "the bound is of the right order"


def pairs(seed: int, tokens: int, rows: int, width: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    """Features of tokens, of pool rows, and which rows are in use."""
    a, b = (torch.nn.functional.normalize(seeded_normal(seed + i, (1, 1, n, width)), dim=-1) for i, n in enumerate((tokens, rows)))
    valid = torch.ones(1, 1, rows, dtype=torch.bool)
    valid[..., rows - rows // 8:] = False
    return a, b, valid


@pytest.mark.parametrize("kind", ["exact", "int8", "lsh"])
@pytest.mark.parametrize("metric", ["paper", "logit"])
def test_every_search_finds_a_clear_match(kind: str, metric: str) -> None:
    tokens, pool, valid = pairs(11, 40, 160)
    tokens = torch.nn.functional.normalize(pool[:, :, 3:123:3] + 0.01 * tokens, dim=-1)
    search = Search(settings_of(search=kind, similarity=metric, bits=8))
    score, index = search.best(tokens, pool, valid, torch.ones(1, 1, 40, dtype=torch.bool))
    assert index[0, 0].tolist() == list(range(3, 123, 3))
    assert score.min() > (0.99 if metric == "paper" else 0.9)


def test_rows_that_are_not_in_use_are_never_found() -> None:
    tokens, pool, _ = pairs(12, 20, 40)
    for kind in ("exact", "int8", "lsh"):
        search = Search(settings_of(search=kind, bits=1))
        none = torch.zeros(1, 1, 40, dtype=torch.bool)
        score, _ = search.best(tokens, pool.fill_(float("nan")) if kind == "exact" else torch.ones_like(pool), none,
                               torch.ones(1, 1, 20, dtype=torch.bool))
        assert (score == NO_MATCH).all(), kind


def test_eight_bit_codes_decide_as_exact_numbers_do() -> None:
    same = total = 0
    for seed in range(20):
        tokens, pool, valid = pairs(100 + 3 * seed, 256, 512, 1536)
        change = torch.linspace(0, 1, 256)[:, None] * tokens  # cosines from 1 down to 0.7
        tokens = torch.nn.functional.normalize(pool[:, :, torch.randperm(448)[:256]] + change, dim=-1)
        asked = torch.ones(1, 1, 256, dtype=torch.bool)
        found = {kind: Search(settings_of(search=kind)).best(tokens, pool, valid, asked) for kind in ("exact", "int8")}
        joins = {kind: score >= 0.85 for kind, (score, _) in found.items()}
        assert 0.3 < joins["exact"].float().mean() < 0.9
        agree = (found["exact"][1] == found["int8"][1]) & (joins["exact"] == joins["int8"])
        same, total = same + int(agree.sum()), total + agree.numel()
    print(f"int8 search: {100 * same / total:.3f} % of {total} decisions equal")
    assert same / total >= 0.999


def test_one_hash_bit_too_many_loses_matches() -> None:
    tokens, pool, valid = pairs(13, 200, 400)
    tokens = torch.nn.functional.normalize(pool[:, :, :200] + 0.1 * tokens, dim=-1)
    asked, found = torch.ones(1, 1, 200, dtype=torch.bool), {}
    for bits, tables in ((4, 4), (31, 1)):
        index = Search(settings_of(search="lsh", bits=bits, tables=tables)).best(tokens, pool, valid, asked)[1]
        found[bits] = float((index[0, 0] == torch.arange(200)).float().mean())
    assert found[4] > 0.95 > found[31]


def test_hashes_are_taken_around_the_mean() -> None:
    """A common offset leaves hashed decisions as they are; around zero all signs would be equal and nothing be sorted out."""
    tokens, pool, valid = pairs(14, 60, 120)
    search = Search(settings_of(search="lsh", bits=8, tables=1))
    for shift in (0.0, 50.0):
        codes = search._hashes(tokens + shift, pool + shift, valid)[1]
        assert len(codes.unique()) > 50
    search._hashes(tokens, pool, valid)
    around_zero = ((pool + 50.0) @ search._planes >= 0).unique(dim=2).shape[2]  # type: ignore[operator]
    assert around_zero < 20


def test_the_neighbourhood_comes_first() -> None:
    near = neighbour_mask(3, 4, 1)
    assert near[5].tolist() == [True, True, True, False] * 3
    assert near[0].tolist() == [True, True, False, False, True, True, False, False, False, False, False, False]
    assert torch.equal(neighbour_mask(3, 4, 0), torch.eye(12, dtype=torch.bool))
    pool = torch.stack([distinct(i)[0] for i in range(12)])[None, None]
    last = torch.arange(11, -1, -1)[None, None]
    score, slot = local_best(pool, pool, last, near, False)
    assert slot[0, 0].tolist() == [s if abs(s // 4 - (11 - s) // 4) <= 1 and abs(s % 4 - (11 - s) % 4) <= 1 else slot[0, 0, s].item()
                                   for s in range(12)]
    nothing = local_best(pool, pool, torch.full((1, 1, 12), -1), near, False)[0]
    assert (nothing == NO_MATCH).all()
    assert score[0, 0, 5] == pytest.approx(1.0)
    assert score[0, 0, 0] == pytest.approx(0.0)


@pytest.mark.parametrize("change", [{"space": "sideways"}, {"bits": 0}, {"tables": 0}, {"recent_frames": -1}, {"usage_decay": 1.0},
                                    {"search": "faiss"}])
def test_settings_that_do_not_exist_are_refused(change: dict[str, Any]) -> None:
    from fastar_pack.fastar_core.errors import ConfigError

    with pytest.raises(ConfigError):
        TempCacheSettings(**change)


def test_settings_survive_a_copy_as_themselves() -> None:
    import copy

    settings = tc(budget_frames=9)
    assert copy.deepcopy(settings) is settings
    assert copy.deepcopy(settings.tempcache) is settings.tempcache
    assert isinstance(settings, PolicySettings)
