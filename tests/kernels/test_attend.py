"""What the case table does not show of `attend`: the reference is the formula, score memory is bounded, poison stays unread."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fastar_pack.kernels import knobs
from fastar_pack.kernels.reference import attend as reference
from fastar_pack.kernels.torch_fast import attend as torch_fast
from fastar_pack.kernels.torch_fast import fused

pytestmark = pytest.mark.cpu

CASES = [  # batch, queries, keys, heads, head_dim
    (1, 1, 1, 1, 16),
    (1, 1, 257, 2, 24),
    (2, 7, 5, 3, 16),
    (1, 9, 65, 2, 13),
]
KINDS = ["none", "full", "per key", "hidden keys"]


def inputs(batch: int, queries: int, keys: int, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    q, k, v = (torch.randn(batch, n, heads, dim, generator=generator) for n in (queries, keys, keys))
    return 2 * q, 2 * k, v


def bias_of(kind: str, batch: int, keys: int, heads: int) -> Tensor | None:
    counts = torch.arange(keys) % 7 + 1.0
    return {
        "none": None,
        "full": counts.log().expand(batch, heads, keys) + 0.1 * torch.arange(heads)[:, None],
        "per key": counts.log()[None, None],
        "hidden keys": torch.where(torch.arange(keys) % 3 == 0, 0.0, float("-inf")).expand(1, 1, keys),
    }[kind]


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """The formula, row by row, in float64: the judge of the reference itself."""
    out = torch.zeros_like(q, dtype=torch.float64)
    for b, i, h in itertools.product(range(q.shape[0]), range(q.shape[1]), range(q.shape[2])):
        scores = (k[b, :, h].double() @ q[b, i, h].double()) / math.sqrt(q.shape[-1])
        if bias is not None:
            scores = scores + bias.expand(q.shape[0], q.shape[2], k.shape[1])[b, h].double()
        weights = (scores - scores.max()).exp()
        out[b, i, h] = weights @ v[b, :, h].double() / weights.sum()
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_the_formula(case: tuple[int, ...], kind: str) -> None:
    q, k, v = (t.double() for t in inputs(*case))
    bias = bias_of(kind, case[0], case[2], case[3])
    assert (reference.attend(q, k, v, bias) - plain(q, k, v, bias)).abs().max() < 1e-12


def test_a_copied_key_equals_a_log_count() -> None:
    """Three copies of a key and one key with bias log 3 are the same; without the bias they are not."""
    q, k, v = inputs(1, 9, 6, 2, 24)
    copied = reference.attend(q, k[:, [0, 1, 2, 2, 2, 3, 4, 5]], v[:, [0, 1, 2, 2, 2, 3, 4, 5]])
    bias = torch.tensor([1.0, 1, 3, 1, 1, 1]).log()[None, None]
    assert (torch_fast.attend(q, k, v, bias) - copied).abs().max() < 1e-5
    assert (torch_fast.attend(q, k, v) - copied).abs().max() > 1e-2


class Watched:
    """Stands in for torch's fused kernel and notes the score bytes each call might need."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain = fused.scaled_dot_product_attention
        self.scores: list[int] = []
        self.cells = 0
        monkeypatch.setattr(fused, "scaled_dot_product_attention", self)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        self.scores.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * fused.SCORE_ELEMENT_BYTES)
        self.cells += q.shape[1] * q.shape[2]
        return torch.empty_like(q) if q.device.type == "meta" else self.plain(q, k, v, **options)

    def clear(self) -> None:
        self.scores.clear()
        self.cells = 0


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_bound_the_score_memory_and_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (t.transpose(1, 2) for t in inputs(2, 300, 70, 3, 24))
    bias = bias_of(kind, 2, 70, 3)
    watched = Watched(monkeypatch)
    whole, _ = fused._in_chunks(q, k, v, bias, False)
    assert len(watched.scores) == 1
    row = 2 * 70 * fused.SCORE_ELEMENT_BYTES
    for rows in (400, 128, 33, 1):
        watched.clear()
        monkeypatch.setenv(knobs.SCORE_MIB, str(rows * row / 2**20))
        got, _ = fused._in_chunks(q, k, v, bias, False)
        assert (got - whole).abs().max() < 1e-5
        assert watched.cells == 3 * 300, "every head and row once"
        assert len(watched.scores) > 1
        assert max(watched.scores) <= rows * row
        explicit, lse = fused._in_chunks(q, k, v, bias, True)
        assert (explicit - whole).abs().max() < 1e-5
        assert lse is not None
        assert lse.shape == (2, 3, 300)


def test_real_sizes_stay_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """480p, 3 new latent frames, 21 visible, 12 heads: a full score matrix would be 7 GB."""
    monkeypatch.delenv(knobs.SCORE_MIB, raising=False)
    watched = Watched(monkeypatch)
    q, k = torch.empty(1, 4680, 12, 128, device="meta"), torch.empty(1, 32760, 12, 128, device="meta")
    assert torch_fast.attend(q, k, k).shape == q.shape
    assert watched.cells == 12 * 4680
    assert max(watched.scores) <= 256 * 2**20
    monkeypatch.setenv(knobs.SCORE_MIB, str(2**20))
    watched.clear()
    torch_fast.attend(q, k, k)
    assert max(watched.scores) > 7 * 10**9, "without the limit the bound would not hold"


@pytest.mark.parametrize("text", ["0", "-3", "many"])
def test_an_impossible_limit_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(knobs.SCORE_MIB, text)
    with pytest.raises(ValueError, match=f"{knobs.SCORE_MIB}='{text}': expected a number of MiB above 0"):
        knobs.score_bytes()


def test_poison_behind_the_last_key_is_not_read() -> None:
    q, k, v = inputs(1, 9, 20, 2, 24)
    k[:, 12:], v[:, 12:] = float("nan"), float("nan")
    for op in (reference, torch_fast):
        assert torch.isfinite(op.attend(q, k[:, :12], v[:, :12])).all()
        assert torch.isnan(op.attend(q, k, v)).any()
