"""The contract of every op. Calling a function of this module checks the arguments of that op and returns nothing.

B batch rows, H heads, N rows, D head dimension. Floating tensors may be strided (unit stride in D); index tensors lie on the same
device. Checks read shapes and dtypes only, never values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .tiles import TileTable

Tensor = torch.Tensor
METRICS = ("dot", "cosine", "l2")
MAX_BITS = 31


class ArgumentError(ValueError):
    """A call breaks the contract of its op."""


def first_tensor(value: Any) -> Tensor:
    """The tensor that decides device and dtype of a call: the first argument, or the first of its parts."""
    while not isinstance(value, Tensor):
        value = value[0]
    return value


def _want(truth: bool, op: str, words: str) -> None:
    if not truth:
        raise ArgumentError(f"{op}: {words}")


def _shape(op: str, name: str, tensor: Tensor, *want: int | tuple[int, ...] | None) -> None:
    """``want`` per axis: a size, a tuple of allowed sizes, or None for any."""
    good = tensor.ndim == len(want) and all(
        w is None or size == w or (isinstance(w, tuple) and size in w) for size, w in zip(tensor.shape, want)
    )
    _want(good, op, f"{name} has shape {tuple(tensor.shape)}, expected {want} (None = any size)")


def _dtype(op: str, name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    _want(tensor.dtype in dtypes, op, f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")


def _qkv(op: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[int, int, int, int]:
    _shape(op, "q", q, None, None, None, None)
    batch, rows, heads, dim = q.shape
    _shape(op, "k", k, batch, None, heads, dim)
    _shape(op, "v", v, batch, k.shape[1], heads, dim)
    _want(q.dtype == k.dtype == v.dtype, op, f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}, expected one dtype")
    if bias is not None:
        _shape(op, "bias", bias, (1, batch), (1, heads), k.shape[1])
        _dtype(op, "bias", bias, torch.float32, torch.float64)
    return batch, rows, heads, k.shape[1]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    return_lse: bool = False,
) -> None:
    """softmax(q k^T / sqrt(D) + bias) v.

    q [B, Nq, H, D], k and v [B, Nk, H, D]; bias float32 [B|1, H|1, Nk], -inf hides a key; lengths int32 [B, H]: keys of that
    head, rows past it are ignored whatever they hold. Returns out [B, Nq, H, D], with return_lse also the natural-log sum
    float32 [B, H, Nq]. A row without keys gives 0 and -inf.
    """
    batch, _, heads, _ = _qkv("attend", q, k, v, bias)
    if lengths is not None:
        _shape("attend", "lengths", lengths, batch, heads)
        _dtype("attend", "lengths", lengths, torch.int32)


def attend_ranges(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    order: Tensor,
    tiles: TileTable,
    return_lse: bool = False,
) -> None:
    """Attention of bucket-sorted query rows over a few key ranges each; everything else as in ``attend``.

    order int32 [B, H, Nq]: original query row of each sorted place. Results come back in the original row order. Rows without
    keys, and rows of no tile, give 0 and -inf: a dense answer for them is the caller's job.
    """
    batch, rows, heads, _ = _qkv("attend_ranges", q, k, v, bias)
    _shape("attend_ranges", "order", order, batch, heads, rows)
    _dtype("attend_ranges", "order", order, torch.int32)
    _shape("attend_ranges", "tiles.row_start", tiles.row_start, batch, heads, None)
    _shape("attend_ranges", "tiles.key_start", tiles.key_start, batch, heads, tiles.row_start.shape[2], None)
    _want(tiles.row_start.is_contiguous() and tiles.key_start.is_contiguous(), "attend_ranges", "tiles are strided")


def hash_codes(x: Tensor, mean: Tensor | None, planes: Tensor) -> None:
    """int32 [B, H, N]; bit i is set when (x - mean) . planes[..., i] >= 0, accumulated in float32 in a fixed order.

    x [B, N, H, D]; mean [B|1, H, D] or None; planes float32 [H|1, D, bits], 1 to 31 bits.
    """
    _shape("hash_codes", "x", x, None, None, None, None)
    batch, _, heads, dim = x.shape
    _shape("hash_codes", "planes", planes, (1, heads), dim, None)
    _dtype("hash_codes", "planes", planes, torch.float32)
    _want(1 <= planes.shape[2] <= MAX_BITS, "hash_codes", f"{planes.shape[2]} bits, expected 1 to {MAX_BITS}")
    if mean is not None:
        _shape("hash_codes", "mean", mean, (1, batch), heads, dim)


def bucket_order(codes: Tensor, num_buckets: int) -> None:
    """(order int32 [B, H, N], offsets int32 [B, H, num_buckets + 1]) of codes int32 [B, H, N] in 0..num_buckets-1.

    order lists the rows bucket by bucket, rows of a bucket in their old order; bucket c is order[offsets[c] : offsets[c+1]].
    """
    _shape("bucket_order", "codes", codes, None, None, None)
    _dtype("bucket_order", "codes", codes, torch.int32)
    _want(num_buckets >= 1, "bucket_order", f"{num_buckets} buckets, expected at least 1")


def tile_table(offsets: Tensor, key_ranges: Tensor, tile_rows: int, num_rows: int) -> None:
    """TileTable of query rows sorted by bucket: each bucket is cut into tiles of ``tile_rows`` rows.

    offsets int32 [B, H, buckets + 1] of the queries; key_ranges int32 [B, H, buckets, R, 2] (start, end) per query bucket;
    num_rows = rows of ``order``, a host number that fixes the size of the table (tiles.max_tiles).
    """
    _shape("tile_table", "offsets", offsets, None, None, None)
    batch, heads, borders = offsets.shape
    _shape("tile_table", "key_ranges", key_ranges, batch, heads, borders - 1, None, 2)
    _dtype("tile_table", "offsets", offsets, torch.int32)
    _dtype("tile_table", "key_ranges", key_ranges, torch.int32)
    _want(tile_rows >= 1, "tile_table", f"tile_rows is {tile_rows}, expected at least 1")
    _want(num_rows >= 0, "tile_table", f"num_rows is {num_rows}, expected 0 or more")


def _search(op: str, q: Tensor, keys: Tensor, valid: Tensor | None, metric: str, *scales: Tensor | None) -> None:
    _shape(op, "q", q, None, None, None, None)
    batch, heads, rows, dim = q.shape
    _shape(op, "keys", keys, batch, heads, None, dim)
    _want(q.dtype == keys.dtype, op, f"q is {q.dtype}, keys are {keys.dtype}, expected one dtype")
    _want(metric in METRICS, op, f"metric {metric!r}, expected one of {', '.join(METRICS)}")
    if valid is not None:
        _shape(op, "valid", valid, batch, heads, keys.shape[2])
        _dtype(op, "valid", valid, torch.bool)
    wanted = q.dtype == torch.int8
    for name, scale, count in zip(("q_scale", "key_scale"), scales, (rows, keys.shape[2])):
        _want((scale is not None) == wanted, op, f"{name} goes with int8 codes and only with them, dtype is {q.dtype}")
        if scale is not None:
            _shape(op, name, scale, batch, heads, count)
            _dtype(op, name, scale, torch.float32)


def nearest(
    q: Tensor,
    keys: Tensor,
    valid: Tensor | None = None,
    metric: str = "dot",
    q_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
) -> None:
    """(index int64 [B, H, N], score float32 [B, H, N]) of the best key of every row; the lowest index wins ties.

    q [B, H, N, D], keys [B, H, M, D], valid bool [B, H, M] (what an invalid key holds does not matter). Scores: dot product,
    cosine (0 with a zero vector), or minus the squared distance (l2). int8 codes come with float32 scales [B, H, N] and
    [B, H, M] (value = code * scale). Without a valid key the index is -1 and the score -inf.
    """
    _search("nearest", q, keys, valid, metric, q_scale, key_scale)


def nearest_candidates(
    q: Tensor,
    keys: Tensor,
    candidates: Tensor,
    valid: Tensor | None = None,
    metric: str = "dot",
    q_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
) -> None:
    """``nearest`` among candidates int32 [N, C] per row (rows of keys, -1 = none; the same for all heads).

    The first of equally good candidates wins.
    """
    _search("nearest_candidates", q, keys, valid, metric, q_scale, key_scale)
    _shape("nearest_candidates", "candidates", candidates, q.shape[2], None)
    _dtype("nearest_candidates", "candidates", candidates, torch.int32, torch.int64)


def compact(x: Tensor, weight: Tensor, group: Tensor, num_slots: int, out_dtype: torch.dtype | None = None) -> None:
    """(mean [B, H, num_slots, D], weight sums float32 [B, H, num_slots]): weighted means of the rows of each slot.

    x [B, H, N, D], weight float32 [B, H, N], group int64 or int32 [B, H, N]: slot of a row, -1 = dropped (its content does not
    matter). Accumulated in float32 in row order; out_dtype defaults to that of x. Empty slots, and slots of weight 0, hold 0.
    """
    _shape("compact", "x", x, None, None, None, None)
    batch, heads, rows, _ = x.shape
    _shape("compact", "weight", weight, batch, heads, rows)
    _shape("compact", "group", group, batch, heads, rows)
    _dtype("compact", "weight", weight, torch.float32)
    _dtype("compact", "group", group, torch.int64, torch.int32)
    _want(num_slots >= 0, "compact", f"num_slots is {num_slots}, expected 0 or more")


def merge_lse(parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """(out, lse) of attention over the union of the keys of all parts.

    Each part is (out [B, N, H, D], lse float32 [B, H, N], natural log) as ``attend`` returns it. Where lse is -inf the part is
    ignored whatever its out holds; where all are, the result is 0 and -inf.
    """
    _want(len(parts) > 0, "merge_lse", "no parts, expected at least one")
    batch, rows, heads, _ = parts[0][0].shape
    for index, (out, lse) in enumerate(parts):
        _want(out.shape == parts[0][0].shape, "merge_lse", f"part {index} has shape {tuple(out.shape)}")
        _shape("merge_lse", f"lse of part {index}", lse, batch, heads, rows)
        _dtype("merge_lse", f"lse of part {index}", lse, torch.float32, torch.float64)


def prompt_keep(q_codes: Tensor, k_codes: Tensor) -> None:
    """bool [B, H, Nk]: does any query share the code of the key?

    q_codes int32 [B, H, Nq], k_codes int32 [B, H, Nk]; with a leading axis of hash tables [T, ...] one table is enough.
    """
    _want(q_codes.ndim in (3, 4), "prompt_keep", f"q_codes has {q_codes.ndim} axes, expected 3 or 4")
    _shape("prompt_keep", "k_codes", k_codes, *q_codes.shape[:-1], None)
    _dtype("prompt_keep", "q_codes", q_codes, torch.int32)
    _dtype("prompt_keep", "k_codes", k_codes, torch.int32)


OPS = (
    "attend",
    "attend_ranges",
    "hash_codes",
    "bucket_order",
    "tile_table",
    "nearest",
    "nearest_candidates",
    "compact",
    "merge_lse",
    "prompt_keep",
)
