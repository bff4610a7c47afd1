"""AnnCA without a host: equal rows, keep rules, and what the pruner remembers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastar_pack.fastar_core.annca import AnnCASettings, PromptPruner
from fastar_pack.fastar_core.annca.keep import keep_tokens
from fastar_pack.fastar_core.annca.pruner import PromptCall
from fastar_pack.fastar_core.annca.row_groups import find_groups
from fastar_pack.fastar_core.attention import Attention
from fastar_pack.fastar_core.errors import ConfigError
from tiny.wan_plain import dense_attention

pytestmark = pytest.mark.cpu
SCHEDULE = (1.0, 0.9, 0.7, 0.4)
EXACT = 1e-5


def words(count: int, width: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def project(context: Tensor, heads: int, dim: int, seed: int) -> Tensor:
    """Keys or values [B, L, heads, dim]: a linear map of every row."""
    matrix = torch.randn(context.shape[-1], heads * dim, generator=torch.Generator().manual_seed(seed)) / context.shape[-1] ** 0.5
    return (context @ matrix).unflatten(-1, (heads, dim))


def test_equal_rows_are_found_anywhere_and_per_batch_row() -> None:
    a, b = words(2)
    context = torch.stack([torch.stack([a, b, a, a, b]), torch.stack([a, a, a, a, a])])
    groups = find_groups(context)
    assert groups.index.tolist() == [[0, 1], [0, 0]]
    assert groups.log_count[0].tolist() == pytest.approx([math.log(3), math.log(2)])
    assert groups.log_count[1, 0].item() == pytest.approx(math.log(5))
    assert groups.log_count[1, 1] == -math.inf, "a filler"
    assert groups.padding.tolist() == [0, 0]
    assert find_groups(words(5)[None]).padding.tolist() == [-1]
    assert not find_groups(words(5)[None]).merges


@pytest.mark.parametrize("dim", [12, 24, 64, 128])
@pytest.mark.parametrize("count", [0, 1, 7, 20])
def test_merged_attention_equals_dense(dim: int, count: int) -> None:
    context = torch.zeros(2, 20, 32)
    context[0, 3:3 + min(count, 17)] = words(min(count, 17))
    context[1, :count] = words(count, seed=1)
    q = torch.randn(2, 6, 2, dim)
    k, v = project(context, 2, dim, 1), project(context, 2, dim, 2)
    pruner = PromptPruner(AnnCASettings(), Attention(), SCHEDULE)
    pruner.start_call(context, ["a"], PromptCall(0.9, 3, 0))
    out = pruner.attend(0, q, k, v)
    dense = dense_attention(0, q, k, v)
    assert (out - dense).abs().max() <= EXACT


def attend(settings: AnnCASettings, q: Tensor, context: Tensor, sigma: float = 0.9, block: int = 0,
           pruner: PromptPruner | None = None) -> tuple[Tensor | None, PromptPruner]:
    pruner = pruner or PromptPruner(settings, Attention(), SCHEDULE)
    pruner.start_call(context, ["a"], PromptCall(sigma, 3, block))
    return pruner.attend(0, q, project(context, 2, 16, 1), project(context, 2, 16, 2)), pruner


def planted(frames: int = 3) -> tuple[Tensor, Tensor]:
    """Queries [1, 12, 2, 16] of which frame f looks at token 3 + 5 f only; context [1, 20, 32] of 18 words and two zero rows."""
    context = torch.cat([words(18), torch.zeros(2, 32)])[None]
    keys = project(context, 2, 16, 1)
    return 8 * torch.stack([keys[:, 3 + 5 * f] for f in range(frames)], 1).repeat_interleave(4, 1), context


def test_each_frame_keeps_what_it_looks_at() -> None:
    q, context = planted()
    settings = AnnCASettings(keep="quant", min_kept=1)
    pruner = PromptPruner(settings, Attention(), SCHEDULE)
    pruner.start_call(context, ["a"], PromptCall(0.9, 3, 0))
    k, v = project(context, 2, 16, 1), project(context, 2, 16, 2)
    out = pruner.attend(0, q, k, v)
    assert (out - dense_attention(0, q, k, v)).abs().max() < 0.1
    kept = next(iter(pruner._kept.values()))
    for frame in range(3):
        shown = set(kept.index[frame][kept.bias[frame] > -math.inf].tolist())
        assert 3 + 5 * frame in shown
        assert {0, 18} <= shown, "the first token and the padding stay"
        assert len(shown) <= 4
    union, _ = attend(AnnCASettings(keep="quant", min_kept=1), q.flip(1), context)
    assert union is not None


def mass_of_words(q: Tensor, k: Tensor, words_in: int) -> Tensor:
    """Mean attention mass [words] of one frame's queries on the words alone, padding left out."""
    return torch.einsum("qhd,khd->hqk", q, k[:words_in]).div(q.shape[-1] ** 0.5).softmax(-1).mean((0, 1))


@pytest.mark.parametrize("coverage", [0.5, 0.8, 0.95, 1.0])
def test_the_mass_rule_keeps_the_fewest_words_that_hold_its_coverage(coverage: float) -> None:
    context = torch.cat([words(18), torch.zeros(2, 32)])[None]
    q, k = 1.5 * torch.randn(1, 36, 2, 16, generator=torch.Generator().manual_seed(4)), project(context, 2, 16, 1)
    _, pruner = attend(AnnCASettings(keep="mass", coverage=coverage, min_kept=1, bits=16), q, context)
    kept = next(iter(pruner._kept.values()))
    for frame in range(3):
        mass = mass_of_words(q[0, 12 * frame:12 * (frame + 1)], k[0], 18)
        shown = set(kept.index[frame][kept.bias[frame] > -math.inf].tolist())
        assert 18 in shown, "the padding stays"
        ranked = mass.argsort(descending=True).tolist()
        needed = next((n for n in range(1, 19) if mass[ranked[:n]].sum() >= coverage - 1e-6), 18)
        assert shown - {18} == set(ranked[:needed]) | {0}
    if coverage == 0.8:
        assert len(shown) < 18


def test_padding_has_no_say_in_the_coverage() -> None:
    """Queries that look at the padding only still keep the words they would look at without it."""
    context = torch.cat([words(18), torch.ones(2, 32)])[None]
    keys = project(context, 2, 16, 1)
    q = (8 * keys[:, 18:19] + keys[:, 5:6]).repeat_interleave(12, 1)
    _, pruner = attend(AnnCASettings(keep="mass", coverage=0.9, min_kept=1, bits=16), q, context)
    kept = next(iter(pruner._kept.values()))
    mass = mass_of_words(q[0, :4], keys[0], 18)
    shown = [i for i in kept.index[0][kept.bias[0] > -math.inf].tolist() if i < 18]
    assert float(mass[shown].sum()) >= 0.9


def test_never_fewer_tokens_than_asked() -> None:
    q, context = planted()
    k = project(context, 2, 16, 1)
    valid = torch.ones(1, 20, dtype=torch.bool)
    always = torch.zeros_like(valid)
    always[:, 0] = True
    for least in (1, 4, 9, 40):
        kept = keep_tokens(q[:, :4], k, valid, always, AnnCASettings(keep="quant", min_kept=least), "auto")
        assert int(kept.sum()) >= min(20, least + 1)
        assert kept[0, 3]


@pytest.mark.parametrize("settings", [AnnCASettings(keep="lsh", bits=4, tables=2), AnnCASettings(keep="quant", per_head=True),
                                      AnnCASettings(keep="mass", coverage=0.7),
                                      AnnCASettings(keep="lsh", bits=6, tables=1, probes=3)])
def test_rules_drop_tokens_and_never_the_one_looked_at(settings: AnnCASettings) -> None:
    q, context = planted()
    out, pruner = attend(settings, q, context)
    assert out is not None
    assert out.isfinite().all()
    share = pruner.report()["kept_share"]
    assert 0.05 < share < 0.95


def test_more_probes_keep_more() -> None:
    q, context = torch.randn(1, 12, 2, 16), planted()[1]
    shares = [attend(AnnCASettings(keep="lsh", bits=4, tables=1, probes=p, min_kept=1), q, context)[1].report()["kept_share"]
              for p in (1, 3, 5)]
    assert shares[0] < shares[1] < shares[2]
    shares = [attend(AnnCASettings(keep="quant", probes=p, min_kept=1), q, context)[1].report()["kept_share"] for p in (1, 3, 18)]
    assert shares[0] < shares[1] < shares[2] == 1


def test_keep_sets_live_for_a_block_and_end_with_the_prompt() -> None:
    q, context = planted()
    settings = AnnCASettings(keep="quant", min_kept=1)
    _, pruner = attend(settings, q, context)
    turned = q.flip(1)
    again, _ = attend(settings, turned, context, 0.7, 0, pruner)
    fresh, _ = attend(settings, turned, context, 0.7, 1, pruner)
    dense = dense_attention(0, turned, project(context, 2, 16, 1), project(context, 2, 16, 2))
    assert (fresh - dense).abs().max() < 0.1 < (again - dense).abs().max(), "the old keep set does not serve the new queries"
    pruner.start_call(words(20, seed=9)[None], ["b"], PromptCall(0.7, 3, 1))
    other = words(20, seed=9)[None]
    out = pruner.attend(0, turned, project(other, 2, 16, 1), project(other, 2, 16, 2))
    kept = {key: value for key, value in pruner._kept.items() if key[1] == ("b",)}
    assert kept, "another prompt decides anew"
    assert out is not None


def test_the_window_is_told_by_sigma() -> None:
    q, context = planted()
    settings = AnnCASettings(keep="quant", start=0.3, end=0.8)
    ran = set()
    for sigma in (1.0, 0.95, 0.9, 0.8, 0.7, 0.5, 0.4, 0.0):
        _, pruner = attend(settings, q, context, sigma)
        ran |= pruner.ran
    assert ran == {(s, 0) for s in (0.9, 0.8, 0.7, 0.5)}


def test_other_lengths_are_left_alone() -> None:
    q, context = planted()
    pruner = PromptPruner(AnnCASettings(), Attention(), SCHEDULE)
    pruner.start_call(context, ["a"], PromptCall(0.9, 3, 0))
    image = torch.randn(1, 257, 2, 16)
    assert pruner.attend(0, q, image, image) is None
    pruner.start_call(None, ["a"], PromptCall(0.9, 3, 0))
    assert pruner.attend(0, q, project(context, 2, 16, 1), project(context, 2, 16, 2)) is None


def test_keys_that_do_not_come_from_the_prompt_are_noticed() -> None:
    q, context = planted()
    pruner = PromptPruner(AnnCASettings(), Attention(), SCHEDULE)
    pruner.start_call(context, ["a"], PromptCall(0.9, 3, 0))
    k, v = project(context, 2, 16, 1), project(context, 2, 16, 2)
    place = torch.linspace(0, 1, 20)[None, :, None, None]
    assert pruner.attend(0, q, k + place, v) is None, "text with positions"
    assert pruner.attend(1, q, torch.randn_like(k), v) is None, "another text of that length"
    assert pruner.attend(2, q, k, v) is not None
    assert pruner.report()["calls"] == {"left alone: keys of equal rows differ": 2, "merged": 1}


def test_settings_refuse_nonsense() -> None:
    for wrong in ({"keep": "some"}, {"bits": 1}, {"probes": 0}, {"min_kept": 0}, {"start": 0.5, "end": 0.2}):
        with pytest.raises(ConfigError):
            AnnCASettings(**wrong)


def test_full_coverage_keeps_every_word() -> None:
    q, context = planted()
    _, pruner = attend(AnnCASettings(keep="mass", coverage=1.0, min_kept=1), 5 * q, context)
    assert pruner.report()["kept_share"] == 1


def test_a_word_said_many_times_counts_as_often() -> None:
    """Equal rows that are not the padding: their group holds the mass of all of them. Queries of zeros look at all rows alike."""
    context = torch.cat([words(6), words(1, seed=5).expand(5, -1), torch.zeros(9, 32)])[None]
    _, pruner = attend(AnnCASettings(keep="mass", coverage=0.4, min_kept=1), torch.zeros(1, 12, 2, 16), context)
    kept = next(iter(pruner._kept.values()))
    shown = set(kept.index[0][kept.bias[0] > -math.inf].tolist())
    assert shown == {0, 6, 11}, "the first word, the repeated one with 5 of 11 rows, the padding"
