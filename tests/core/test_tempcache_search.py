"""What counts as similar, and that every way of searching finds it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.tempcache_tools import settings_of
from fastar_pack.fastar_core.noise import seeded_normal
from fastar_pack.fastar_core.tempcache.features import QueryMoment, features, similarity
from fastar_pack.fastar_core.tempcache.matching import NO_MATCH, RowIndex, Search, local_best
from fastar_pack.fastar_core.tempcache.rows import MeanRows

pytestmark = pytest.mark.cpu


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


def found(search: Search, tokens: Tensor, pool: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    rows, scale = search.coded(pool)
    return search.best(tokens, rows, scale, valid)


@pytest.mark.parametrize("kind", ["exact", "int8", "lsh"])
@pytest.mark.parametrize("metric", ["paper", "logit"])
def test_every_search_finds_a_clear_match(kind: str, metric: str) -> None:
    tokens, pool, valid = pairs(11, 40, 160)
    tokens = torch.nn.functional.normalize(pool[:, :, 3:123:3] + 0.01 * tokens, dim=-1)
    search = Search(settings_of(search=kind, similarity=metric, bits=8))
    score, index = found(search, tokens, pool, valid)
    assert index[0, 0].tolist() == list(range(3, 123, 3))
    assert score.min() > (0.98 if metric == "paper" else 0.9), "codes of unit rows err by some thousandths"


def test_rows_that_are_not_in_use_are_never_found() -> None:
    tokens, pool, _ = pairs(12, 20, 40)
    for kind in ("exact", "int8", "lsh"):
        search = Search(settings_of(search=kind, bits=1))
        none = torch.zeros(1, 1, 40, dtype=torch.bool)
        for held in (float("nan"), 1.0):
            score, _ = found(search, tokens, torch.full_like(pool, held), none)
            assert (score == NO_MATCH).all(), kind


def test_eight_bit_codes_decide_as_exact_numbers_do() -> None:
    same = total = 0
    for seed in range(20):
        tokens, pool, valid = pairs(100 + 3 * seed, 256, 512, 1536)
        change = torch.linspace(0, 1, 256)[:, None] * tokens  # cosines from 1 down to 0.7
        tokens = torch.nn.functional.normalize(pool[:, :, torch.randperm(448)[:256]] + change, dim=-1)
        best = {kind: RowIndex(Search(settings_of(search=kind)), MeanRows(pool), valid, None, [tokens]).best(0)
                for kind in ("exact", "int8")}
        joins = {kind: score >= 0.85 for kind, (score, _) in best.items()}
        assert 0.3 < joins["exact"].float().mean() < 0.9
        agree = (best["exact"][1] == best["int8"][1]) & (joins["exact"] == joins["int8"])
        same, total = same + int(agree.sum()), total + agree.numel()
    print(f"int8 search: {100 * same / total:.3f} % of {total} decisions equal")
    assert same / total >= 0.999


def test_one_hash_bit_too_many_loses_matches() -> None:
    tokens, pool, valid = pairs(13, 200, 400)
    tokens = torch.nn.functional.normalize(pool[:, :, :200] + 0.1 * tokens, dim=-1)
    right = {}
    for bits, tables in ((4, 4), (31, 1)):
        index = found(Search(settings_of(search="lsh", bits=bits, tables=tables)), tokens, pool, valid)[1]
        right[bits] = float((index[0, 0] == torch.arange(200)).float().mean())
    assert right[4] > 0.95 > right[31]


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


@pytest.mark.parametrize("reach", [0, 1, 2])
def test_the_neighbourhood_comes_first(reach: int) -> None:
    """As all pairs with those out of reach struck out."""
    rows, cols = 3, 4
    y, x = torch.arange(12) // cols, torch.arange(12) % cols
    near = ((y[:, None] - y).abs() <= reach) & ((x[:, None] - x).abs() <= reach)
    tokens, groups = (torch.nn.functional.normalize(seeded_normal(i, (2, 3, 12, 24)), dim=-1) for i in (21, 22))
    last = torch.stack([torch.randperm(12, generator=torch.Generator().manual_seed(i)) for i in range(6)]).view(2, 3, 12)
    last[0, 0, :5] = -1
    score, slot = local_best(tokens, groups, last, (rows, cols), reach, False)
    wanted = similarity(tokens, groups, False).masked_fill(~near | (last < 0)[:, :, None], NO_MATCH).max(-1)
    assert (score - wanted.values).abs().max() <= 1e-6
    some = wanted.values > NO_MATCH
    assert torch.equal(slot[some], torch.gather(last, 2, wanted.indices)[some])
    wider = local_best(tokens, groups, last, (rows, cols), reach + 1, False)[0]
    assert (wider > score).any(), "a wider reach finds more"
    assert (local_best(tokens, groups, torch.full_like(last, -1), (rows, cols), reach, False)[0] == NO_MATCH).all()
