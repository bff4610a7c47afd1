"""What counts as similar, and that every way of searching finds it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.tempcache_tools import distinct, settings_of
from fastar_pack.fastar_core.noise import seeded_normal
from fastar_pack.fastar_core.tempcache.features import QueryMoment, features, similarity
from fastar_pack.fastar_core.tempcache.matching import NO_MATCH, Search, local_best, neighbour_mask

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
