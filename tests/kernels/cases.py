"""The case table: for every op, calls that cover its edges, small enough for an interpreter of kernels.

A case builds its tensors from a seed for a dtype and a device. Float inputs are views into larger memory that is NaN all around
them, so that a read past an end shows in the result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastar_pack.kernels.reference.bucket_order import bucket_order
from fastar_pack.kernels.reference.tile_table import tile_table

INF = float("inf")
Args = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One call of an op. ``why`` says which edge it is there for."""

    op: str
    why: str
    build: Callable[[torch.Generator, torch.dtype], Args]
    floating: bool = True  # the first argument is a floating tensor, so dtypes make a difference

    @property
    def wide(self) -> bool:
        """Head dimensions that some back-ends take in half precision only."""
        return "dimension 256" in self.why

    @property
    def name(self) -> str:
        return f"{self.op}: {self.why}"

    def args(self, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Args:
        generator = torch.Generator().manual_seed(seed)
        return tuple(moved(value, device) for value in self.build(generator, dtype))


def moved(value: Any, device: str) -> Any:
    """Tensors (also inside of tile tables and lists) on the device; strides and what lies around a view are kept."""
    if isinstance(value, Tensor):
        if value._base is None or not value.is_floating_point():
            return value.to(device)
        base = value._base.to(device)
        return base.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, list | tuple):
        return type(value)(moved(item, device) for item in value)
    if hasattr(value, "tile_rows"):
        parts = (value.row_start, value.row_count, value.key_start, value.key_end)
        return type(value)(*(part.to(device) for part in parts), value.tile_rows, value.covers_rows)
    return value


def framed(values: Tensor, axis: int = 1) -> Tensor:
    """The same values as a strided view whose neighbours along ``axis`` are NaN (the least integer for integers)."""
    shape = list(values.shape)
    shape[axis] += 9
    poison = float("nan") if values.is_floating_point() else torch.iinfo(values.dtype).min
    buffer = torch.full(shape, poison, dtype=values.dtype)
    view = buffer.narrow(axis, 5, values.shape[axis])
    view.copy_(values)
    return view


def rows(g: torch.Generator, dtype: torch.dtype, *shape: int, size: float = 1.5, axis: int = 1) -> Tensor:
    return framed((torch.randn(*shape, generator=g) * size).to(dtype), axis)


def log_counts(g: torch.Generator, *shape: int, most: int = 9) -> Tensor:
    return framed(torch.randint(1, most, shape, generator=g).float().log(), axis=2)


def _attend(
    batch: int, nq: int, nk: int, heads: int, dim: int, extra: Callable[[torch.Generator], Args] | None = None, size: float = 1.5
) -> Callable[[torch.Generator, torch.dtype], Args]:
    def build(g: torch.Generator, dtype: torch.dtype) -> Args:
        q = rows(g, dtype, batch, nq, heads, dim, size=size)
        k, v = (rows(g, dtype, batch, nk, heads, dim, size=s) for s in (size, 1.0))
        return q, k, v, *(extra(g) if extra else ())

    return build


def _hidden(g: torch.Generator, *shape: int) -> Tensor:
    """A bias that hides a third of the keys, and every key of the last head."""
    bias = torch.where(torch.rand(*shape, generator=g) < 0.33, -INF, 0.0)
    bias[:, -1] = -INF
    return framed(bias, axis=2)


def _lengths(*values: int) -> Tensor:
    return torch.tensor([values], dtype=torch.int32)


ATTEND = [
    ("one query, one key", _attend(1, 1, 1, 1, 64)),
    ("ragged tails, batch and heads above one", _attend(2, 70, 150, 2, 64)),
    ("head dimension 128, bias per head", _attend(1, 129, 200, 2, 128, lambda g: (log_counts(g, 1, 2, 200),))),
    ("bias per batch row and head", _attend(2, 33, 65, 2, 64, lambda g: (log_counts(g, 2, 2, 65),))),
    ("one bias for all heads", _attend(2, 40, 96, 3, 64, lambda g: (log_counts(g, 1, 1, 96),))),
    ("head dimension 80 between the common ones", _attend(1, 30, 70, 2, 80, lambda g: (log_counts(g, 1, 2, 70),))),
    ("head dimension 40, odd sizes", _attend(1, 17, 31, 3, 40)),
    ("head dimension 256", _attend(1, 20, 40, 1, 256)),
    ("counts up to 750", _attend(1, 64, 190, 2, 64, lambda g: (log_counts(g, 1, 2, 190, most=750),))),
    ("hidden keys, one head without any", _attend(1, 50, 90, 3, 64, lambda g: (_hidden(g, 1, 3, 90),))),
    ("lengths per head, one of them zero", _attend(1, 40, 160, 3, 64, lambda g: (None, _lengths(160, 0, 77)))),
    ("lengths and bias", _attend(1, 40, 160, 2, 64, lambda g: (log_counts(g, 1, 2, 160), _lengths(131, 64)))),
    ("large logits", _attend(1, 40, 130, 2, 64, size=12.0)),
    ("no keys", _attend(1, 7, 0, 2, 64)),
    ("no queries", _attend(1, 0, 7, 2, 64)),
]


def _ranges(
    batch: int,
    nq: int,
    nk: int,
    heads: int,
    dim: int,
    buckets: int,
    tile: int,
    spans: Callable[[torch.Generator, int, int], list[tuple[int, int]]],
    biased: bool = True,
) -> Callable[[torch.Generator, torch.dtype], Args]:
    def build(g: torch.Generator, dtype: torch.dtype) -> Args:
        q = rows(g, dtype, batch, nq, heads, dim)
        k, v = (rows(g, dtype, batch, nk, heads, dim) for _ in range(2))
        codes = torch.randint(0, max(1, buckets - 1), (batch, heads, nq), generator=g, dtype=torch.int32)
        order, offsets = bucket_order(codes, buckets)  # the last bucket stays empty when there are several
        table = [[[spans(g, c, nk) for c in range(buckets)] for _ in range(heads)] for _ in range(batch)]
        tiles = tile_table(offsets, torch.tensor(table, dtype=torch.int32), tile, nq)
        return q, k, v, log_counts(g, batch, heads, nk) if biased else None, order, tiles

    return build


def everything(g: torch.Generator, bucket: int, nk: int) -> list[tuple[int, int]]:
    return [(0, nk)]


def scattered(g: torch.Generator, bucket: int, nk: int) -> list[tuple[int, int]]:
    """Three disjoint ranges: a long one, one of a single row, an empty one; for bucket 1 nothing at all."""
    if bucket == 1:
        return [(0, 0), (5, 3), (0, 0)]
    cut = sorted(int(n) for n in torch.randperm(nk - 2, generator=g)[:2] + 1)
    return [(0, cut[0]), (cut[1], cut[1] + 1), (7, 7)]


ATTEND_RANGES = [
    ("one tile, one range", _ranges(1, 5, 9, 1, 64, 1, 16, everything)),
    ("ranges that cover all keys", _ranges(1, 150, 170, 2, 64, 3, 64, everything, biased=False)),
    ("empty buckets, ranges of one row, buckets without keys", _ranges(1, 150, 230, 2, 64, 4, 64, scattered)),
    ("batch above one, head dimension 128", _ranges(2, 90, 150, 2, 128, 3, 32, scattered)),
    ("head dimension 80", _ranges(1, 40, 70, 2, 80, 3, 32, scattered)),
    ("more buckets than rows", _ranges(1, 3, 40, 2, 64, 8, 16, scattered)),
    ("no queries", _ranges(1, 0, 40, 2, 64, 2, 16, everything)),
]


def _hash(
    batch: int, n: int, heads: int, dim: int, bits: int, planes_heads: int, mean_batch: int
) -> Callable[[torch.Generator, torch.dtype], Args]:
    def build(g: torch.Generator, dtype: torch.dtype) -> Args:
        x = rows(g, dtype, batch, n, heads, dim)
        mean = rows(g, dtype, mean_batch, heads, dim) if mean_batch else None
        return x, mean, torch.randn(planes_heads, dim, bits, generator=g)

    return build


def _hash_at_zero(g: torch.Generator, dtype: torch.dtype) -> Args:
    """Rows equal to the mean project to exactly 0, and 0 counts as positive."""
    mean = torch.randn(1, 2, 64, generator=g).to(dtype)
    return mean[:, None].expand(1, 6, 2, 64).contiguous(), mean, torch.randn(2, 64, 5, generator=g)


HASH_CODES = [
    ("four bits, planes per head, a mean", _hash(2, 75, 3, 64, 4, 3, 2)),
    ("one bit, shared planes, no mean", _hash(1, 33, 2, 128, 1, 1, 0)),
    ("31 bits, head dimension 40, one mean", _hash(2, 20, 2, 40, 31, 2, 1)),
    ("rows equal to the mean", _hash_at_zero),
    ("no rows", _hash(1, 0, 2, 64, 3, 2, 1)),
]


def _codes(batch: int, heads: int, n: int, buckets: int, used: int) -> Callable[[torch.Generator, torch.dtype], Args]:
    return lambda g, _: (torch.randint(0, used, (batch, heads, n), generator=g, dtype=torch.int32), buckets)


BUCKET_ORDER = [
    ("several blocks, empty buckets at the end", _codes(2, 2, 700, 12, 9)),
    ("one bucket", _codes(1, 2, 300, 1, 1)),
    ("one row", _codes(1, 1, 1, 4, 4)),
    ("128 buckets", _codes(1, 2, 400, 128, 128)),
    ("no rows", _codes(1, 2, 0, 3, 3)),
]


def _table(batch: int, heads: int, n: int, buckets: int, ranges: int, tile: int) -> Callable[[torch.Generator, torch.dtype], Args]:
    def build(g: torch.Generator, _: torch.dtype) -> Args:
        codes = torch.randint(0, buckets, (batch, heads, n), generator=g, dtype=torch.int32)
        codes[codes == 1] = 0
        spans = torch.randint(0, 99, (batch, heads, buckets, ranges, 2), generator=g, dtype=torch.int32)
        return bucket_order(codes, buckets)[1], spans, tile, n

    return build


TILE_TABLE = [
    ("ragged buckets, one of them empty", _table(2, 3, 300, 5, 3, 32)),
    ("tile larger than the rows", _table(1, 2, 20, 3, 1, 128)),
    ("tiles of one row", _table(1, 1, 7, 2, 2, 1)),
    ("no rows", _table(1, 2, 0, 4, 2, 64)),
]
