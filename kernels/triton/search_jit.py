"""Search for the nearest key: a running best per place in the tile, reduced at the end, so no score leaves the chip.

METRIC: 0 dot product, 1 cosine, 2 minus the squared distance. Ties go to the lowest index (first candidate).
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["rows", "num_keys"],
    do_not_specialize_on_alignment=["valid", "q_scale", "key_scale", "index", "score"],
)
def nearest_kernel(
    q, keys, valid, q_scale, key_scale, index, score,
    sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, heads, rows, num_keys,
    METRIC: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, batch * heads); valid uint8 [B, H, M] or None; scales float32 [B, H, N] and [B, H, M] or None."""
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    cols = tl.arange(0, BLOCK_N)
    live = row < rows
    inside = live[:, None] & (dims[None, :] < D)
    q_at = q + batch * sq_b + head * sq_h + row.to(tl.int64)[:, None] * sq_n + dims[None, :]
    q_tile = tl.load(q_at, mask=inside, other=0)
    key_base = keys + batch * sk_b + head * sk_h
    key_tile = cols[None, :] * sk_n + dims[:, None]
    best = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
    where = tl.full([BLOCK_M, BLOCK_N], 2147483647, tl.int32)
    for start in range(0, num_keys, BLOCK_N):
        at = start + cols
        use = at < num_keys
        tile = tl.load(
            key_base + tl.cast(start, tl.int64) * sk_n + key_tile, mask=use[None, :] & (dims[:, None] < D), other=0
        )
        if key_scale is not None:
            value = tl.dot(q_tile, tile).to(tl.float32)
            scale = tl.load(key_scale + pair * num_keys + at, mask=use, other=0.0)
        else:
            value = tl.dot(q_tile, tile, input_precision=PRECISION)
        wide = tile.to(tl.float32)
        if METRIC == 1:  # the scale of a code cancels
            size = tl.sum(wide * wide, 0)
            value = value * tl.where(size > 0.0, 1.0 / tl.sqrt(tl.where(size > 0.0, size, 1.0)), 0.0)[None, :]
        else:
            if key_scale is not None:
                value = value * scale[None, :]
            if METRIC == 2:
                size = tl.sum(wide * wide, 0)
                if key_scale is not None:
                    size = size * scale * scale
                    own = tl.load(q_scale + pair * rows + row, mask=live, other=0.0)
                    value = value * own[:, None]
                value = 2.0 * value - size[None, :]
        if valid is not None:
            use = use & (tl.load(valid + pair * num_keys + at, mask=use, other=0) != 0)
        value = tl.where(use[None, :], value, float("-inf"))
        better = value > best
        best = tl.where(better, value, best)
        where = tl.where(better, at[None, :], where)
    top = tl.max(best, 1)
    first = tl.min(tl.where(best == top[:, None], where, 2147483647), 1)
    empty = top == float("-inf")
    own = tl.full([BLOCK_M], 1.0, tl.float32)
    if q_scale is not None:
        own = tl.load(q_scale + pair * rows + row, mask=live, other=0.0)
    wide_q = q_tile.to(tl.float32)
    size_q = tl.sum(wide_q * wide_q, 1)
    if METRIC == 0:
        top = tl.where(empty, top, top * own)
    elif METRIC == 1:
        top = tl.where(empty, top, top * tl.where(size_q > 0.0, 1.0 / tl.sqrt(tl.where(size_q > 0.0, size_q, 1.0)), 0.0))
    else:
        top = tl.where(empty, top, tl.minimum(top - size_q * own * own, 0.0))
    tl.store(score + pair * rows + row, top, mask=live)
    tl.store(index + pair * rows + row, tl.where(empty, -1, first).to(tl.int64), mask=live)


@triton.jit(
    do_not_specialize=["rows", "num_keys", "count"],
    do_not_specialize_on_alignment=["candidates", "valid", "q_scale", "key_scale", "index", "score"],
)
def candidates_kernel(
    q, keys, candidates, valid, q_scale, key_scale, index, score,
    sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, heads, rows, num_keys, count,
    METRIC: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, batch * heads); candidates int32 [N, count], -1 = none."""
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    live = row < rows
    inside = live[:, None] & (dims[None, :] < D)
    q_at = q + batch * sq_b + head * sq_h + row.to(tl.int64)[:, None] * sq_n + dims[None, :]
    own = tl.load(q_at, mask=inside, other=0).to(tl.float32)
    if q_scale is not None:
        own = own * tl.load(q_scale + pair * rows + row, mask=live, other=0.0)[:, None]
    size = tl.sum(own * own, 1)
    own_length = tl.where(size > 0.0, 1.0 / tl.sqrt(tl.where(size > 0.0, size, 1.0)), 0.0)
    key_base = keys + batch * sk_b + head * sk_h
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    where = tl.full([BLOCK_M], -1, tl.int32)
    for c in range(count):
        at = tl.load(candidates + row.to(tl.int64) * count + c, mask=live, other=-1)
        use = (at >= 0) & (at < num_keys)
        if valid is not None:
            use = use & (tl.load(valid + pair * num_keys + at, mask=use, other=0) != 0)
        other_at = key_base + at.to(tl.int64)[:, None] * sk_n + dims[None, :]
        other = tl.load(other_at, mask=use[:, None] & (dims[None, :] < D), other=0).to(tl.float32)
        if key_scale is not None:
            other = other * tl.load(key_scale + pair * num_keys + at, mask=use, other=0.0)[:, None]
        if METRIC == 2:
            value = -tl.sum((own - other) * (own - other), 1)
        else:
            value = tl.sum(own * other, 1)
            if METRIC == 1:
                size = tl.sum(other * other, 1)
                value = value * own_length * tl.where(size > 0.0, 1.0 / tl.sqrt(tl.where(size > 0.0, size, 1.0)), 0.0)
        better = use & (value > best)
        best = tl.where(better, value, best)
        where = tl.where(better, at, where)
    tl.store(score + pair * rows + row, best, mask=live)
    tl.store(index + pair * rows + row, where.to(tl.int64), mask=live)
