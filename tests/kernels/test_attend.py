"""Every back-end of `attend` against the float64 reference: odd sizes, bias, chunks, poisoned memory, bounded score memory."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from fastar_pack.kernels.reference import attend as reference
from fastar_pack.kernels.torch_fast import attend as torch_fast

pytestmark = pytest.mark.cpu

CASES = [  # batch, queries, keys, heads, head_dim
    (1, 1, 1, 1, 16),
    (1, 1, 257, 2, 24),
    (2, 7, 5, 3, 16),
    (1, 33, 65, 2, 128),
    (3, 130, 31, 1, 40),
    (1, 64, 64, 4, 13),
    (2, 17, 300, 12, 32),
]


def inputs(batch: int, queries: int, keys: int, heads: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    q, k, v = (torch.randn(batch, n, heads, dim, generator=generator) for n in (queries, keys, keys))
    return 2 * q, 2 * k, v


def biases(batch: int, keys: int, heads: int) -> dict[str, Tensor | None]:
    counts = torch.arange(keys) % 7 + 1.0
    full = counts.log().expand(batch, heads, keys) + 0.1 * torch.arange(heads)[:, None]
    hidden = torch.where(torch.arange(keys) % 3 == 0, 0.0, float("-inf")).expand(1, 1, keys)
    return {"none": None, "full": full, "per key": counts.log()[None, None], "hidden keys": hidden}


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


@pytest.mark.parametrize("kind", ["none", "full", "per key", "hidden keys"])
@pytest.mark.parametrize("case", CASES[:4])
def test_the_reference_is_the_formula(case: tuple[int, ...], kind: str) -> None:
    q, k, v = inputs(*case)
    bias = biases(case[0], case[2], case[3])[kind]
    assert (reference.attend(q.double(), k, v, bias) - plain(q, k, v, bias)).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["none", "full", "per key", "hidden keys"])
@pytest.mark.parametrize("case", CASES)
def test_torch_fast_equals_the_reference(case: tuple[int, ...], kind: str, poisoned_memory: None) -> None:
    q, k, v = inputs(*case)
    bias = biases(case[0], case[2], case[3])[kind]
    got = torch_fast.attend(q, k, v, bias)
    assert got.shape == q.shape
    assert got.dtype == q.dtype
    assert (got - reference.attend(q, k, v, bias)).abs().max() < 1e-5


def test_a_copied_key_equals_a_log_count() -> None:
    """Three copies of a key and one key with bias log 3 are the same; without the bias they are not."""
    q, k, v = inputs(1, 9, 6, 2, 24)
    copied = reference.attend(q, k[:, [0, 1, 2, 2, 2, 3, 4, 5]], v[:, [0, 1, 2, 2, 2, 3, 4, 5]])
    bias = torch.tensor([1.0, 1, 3, 1, 1, 1]).log()[None, None]
    assert (torch_fast.attend(q, k, v, bias) - copied).abs().max() < 1e-5
    assert (torch_fast.attend(q, k, v) - copied).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biased", [False, True])
def test_half_precision_stays_within_its_rounding(dtype: torch.dtype, biased: bool) -> None:
    q, k, v = (t.to(dtype) for t in inputs(2, 17, 300, 2, 32))
    bias = biases(2, 300, 2)["full"] if biased else None
    got, exact = torch_fast.attend(q, k, v, bias), reference.attend(q.double(), k, v, bias)
    assert got.dtype == dtype
    assert (got.double() - exact).abs().max() < 4 * torch.finfo(dtype).eps * v.abs().max()


class Watched:
    """Stands in for the fused kernel and notes the score bytes each call may need."""

    def __init__(self) -> None:
        self.fused = torch_fast.scaled_dot_product_attention
        self.scores: list[int] = []
        self.rows: list[int] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        self.scores.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * torch_fast.SCORE_ELEMENT_BYTES)
        self.rows.append(q.shape[2])
        return self.fused(q, k, v, **options)


@pytest.mark.parametrize("kind", ["none", "full", "per key", "hidden keys"])
def test_chunks_bound_the_score_memory_and_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(2, 100, 70, 3, 24)
    bias = biases(2, 70, 3)[kind]
    watched = Watched()
    monkeypatch.setattr(torch_fast, "scaled_dot_product_attention", watched)
    whole = torch_fast.attend(q, k, v, bias)
    assert watched.rows == [100]
    for limit in (2 * 3 * 70 * 4 * 33, 2 * 3 * 70 * 4, 1):
        watched.scores.clear()
        watched.rows.clear()
        monkeypatch.setattr(torch_fast, "MAX_SCORE_BYTES", limit)
        got = torch_fast.attend(q, k, v, bias)
        assert (got - whole).abs().max() < 1e-5
        assert sum(watched.rows) == 100
        assert max(watched.scores) <= max(limit, 2 * 3 * 70 * 4), "one row is the least that can be asked for"


def test_real_sizes_stay_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """480p, 3 new latent frames, 21 visible, 12 heads: a full score matrix would be 7 GB."""
    watched = Watched()
    watched.fused = lambda q, k, v, **options: torch.empty(q.shape, device="meta")  # type: ignore[assignment]
    monkeypatch.setattr(torch_fast, "scaled_dot_product_attention", watched)
    q, k = torch.empty(1, 4680, 12, 128, device="meta"), torch.empty(1, 32760, 12, 128, device="meta")
    assert torch_fast.attend(q, k, k).shape == q.shape
    assert max(watched.scores) <= torch_fast.MAX_SCORE_BYTES == 256 * 2**20
    assert sum(watched.rows) == 4680
    monkeypatch.setattr(torch_fast, "MAX_SCORE_BYTES", 2**60)
    watched.scores.clear()
    torch_fast.attend(q, k, k)
    assert max(watched.scores) > 7 * 10**9, "without the limit the bound would not hold"


def test_poison_behind_the_last_key_is_not_read() -> None:
    q, k, v = inputs(1, 9, 20, 2, 24)
    k[:, 12:], v[:, 12:] = float("nan"), float("nan")
    for op in (reference, torch_fast):
        assert torch.isfinite(op.attend(q, k[:, :12], v[:, :12])).all()
        assert torch.isnan(op.attend(q, k, v)).any()


def test_when_a_back_end_says_no() -> None:
    q, k, v = inputs(1, 3, 4, 1, 16)
    assert torch_fast.why_not(q, k, v, None) is None
    assert "no keys" in str(torch_fast.why_not(q, k[:, :0], v[:, :0], None))
    assert reference.why_not(q, k, v, None) is None
