"""Forms of the Triton attention kernel that calls do not take by themselves: other tiles, and keys through tensor descriptors."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs Triton's interpreter: a lane of its own", allow_module_level=True)

from fastar_pack.kernels import registry
from fastar_pack.kernels.triton import attention
from fastar_pack.kernels.triton.shapes import SHARED_LIMIT, Shape, attend_shape, family
from kernels.compare import TOLERANCE, fault, widened
from kernels.more_cases import CASES, Case

pytestmark = pytest.mark.cpu

SHAPES = [(128, 64), (64, 32), (32, 32), (16, 16)]
CHOSEN = [case for case in CASES if case.name in (
    "attend_ranges: empty buckets, ranges of one row, buckets without keys",
    "attend_ranges: ranges that cover all keys",
    "attend_ranges: batch above one, head dimension 128",
    "attend: lengths and bias",
    "attend: ragged tails, batch and heads above one",
)]  # fmt: skip


def run(case: Case, shape: Shape | None, descriptors: bool, dtype: torch.dtype) -> str | None:
    args = case.args(dtype)
    q, k, v, bias, *rest = (*args, None, None)[: 6 if case.op == "attend_ranges" else 5]
    if case.op == "attend_ranges":
        got = attention.run(q, k, v, bias, True, order=rest[0], tiles=rest[1], shape=shape, descriptors=descriptors)
    else:
        got = attention.run(q, k, v, bias, True, lengths=rest[0], shape=shape, descriptors=descriptors)
    want = registry.call(case.op, "reference", *widened(args), return_lse=True)
    return fault(case.op, args, got, want, TOLERANCE[dtype])


@pytest.mark.parametrize("rows_keys", SHAPES)
@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_the_tile_does_not_matter(case: Case, rows_keys: tuple[int, int]) -> None:
    assert run(case, Shape(*rows_keys, 4, 1, "ieee"), False, torch.float32) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_descriptors_read_the_same_keys(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiles that a descriptor loads end inside of a range, so NaN behind it does not come in."""
    made = []
    plain = attention._descriptor
    monkeypatch.setattr(attention, "arch", lambda device: "sm_90")
    monkeypatch.setattr(attention, "_descriptor", lambda *args: made.append(args) or plain(*args))
    assert run(case, Shape(64, 32, 4, 1, "ieee"), True, dtype) is None
    assert len(made) == 2, "keys and values"


def test_unknown_gpus_get_a_shape() -> None:
    for arch in ("sm_75", "sm_87", "sm_103", "sm_121", "gfx90a", "gfx1201"):
        assert family(arch) in SHARED_LIMIT
        for dtype in (torch.float16, torch.float32):
            shape = attend_shape(arch, dtype, 128)
            assert shape.rows >= 16
            assert shape.precision == ("ieee" if arch.startswith("gfx") else "tf32x3")


def test_addresses_have_64_bits() -> None:
    """Keys behind 2**32 elements of a cache whose memory is reserved but, except for the last rows, never touched."""
    rows, seen = 2**26, 70
    g = torch.Generator().manual_seed(4)
    k, v = (torch.empty(1, rows, 1, 64, dtype=torch.float16) for _ in range(2))
    for cache in (k, v):
        cache[:, -seen:] = torch.randn(1, seen, 1, 64, generator=g).half()
    q = torch.randn(1, 5, 1, 64, generator=g).half()
    spans = torch.tensor([[rows - seen, rows]], dtype=torch.int32).expand(1, 1, 1, 1, 2).contiguous()
    order = torch.arange(5, dtype=torch.int32).expand(1, 1, 5)
    offsets = torch.tensor([[[0, 5]]], dtype=torch.int32)
    tiles = registry.call("tile_table", "triton", offsets, spans, 16, 5)
    got = registry.call("attend_ranges", "triton", q, k, v, None, order, tiles)
    want = registry.call("attend", "reference", q.double(), k[:, -seen:].double(), v[:, -seen:].double())
    assert float((got.double() - want).norm() / want.norm()) < TOLERANCE[torch.float16]
