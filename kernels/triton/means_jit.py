"""Kernels that average rows: segment means for compaction, and joining partial attention results."""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "slots"], do_not_specialize_on_alignment=["weight", "order", "offsets", "total"])
def means_kernel(
    x, weight, order, offsets, mean, total, sx_b, sx_h, sx_n, heads, rows, slots,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of slots, batch * heads). order lists the rows of a head slot by slot; each slot adds its rows in that order.

    The loop runs as often as the fullest slot of the block has rows, without atomics: the same bits every time.
    """
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    slot = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    known = slot < slots
    dims = tl.arange(0, BLOCK_D)
    begin = tl.load(offsets + pair * (slots + 1) + slot, mask=known, other=0)
    end = tl.load(offsets + pair * (slots + 1) + slot + 1, mask=known, other=0)
    base = x + batch * sx_b + head * sx_h
    acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    weights = tl.zeros([BLOCK_S], tl.float32)
    for step in range(tl.max(end - begin, 0)):
        at = begin + step
        use = at < end
        row = tl.load(order + pair * rows + at, mask=use, other=0)
        share = tl.load(weight + pair * rows + row, mask=use, other=0.0)
        inside = use[:, None] & (dims[None, :] < D)
        acc += tl.load(base + row.to(tl.int64)[:, None] * sx_n + dims[None, :], mask=inside, other=0.0).to(tl.float32) * share[:, None]
        weights += share
    empty = weights == 0.0
    acc = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, weights)[:, None])
    out = mean + (pair * slots + slot)[:, None] * D + dims[None, :]
    tl.store(out, acc.to(mean.dtype.element_ty), mask=known[:, None] & (dims[None, :] < D))
    tl.store(total + pair * slots + slot, weights, mask=known)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["lse_a", "lse_b", "lse"])
def merge_kernel(
    a, lse_a, b, lse_b, out, lse, sa_b, sa_n, sa_h, sb_b, sb_n, sb_h, so_b, so_n, so_h, heads, rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, batch * heads): two parts into one; a part with log sum -inf is not read."""
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = row < rows
    dims = tl.arange(0, BLOCK_D)
    wide = row.to(tl.int64)[:, None]
    first = tl.load(lse_a + pair * rows + row, mask=live, other=float("-inf"))
    second = tl.load(lse_b + pair * rows + row, mask=live, other=float("-inf"))
    top = tl.maximum(first, second)
    top = tl.where(top == float("-inf"), 0.0, top)
    share_a, share_b = tl.exp(first - top), tl.exp(second - top)
    total = share_a + share_b
    inside = live[:, None] & (dims[None, :] < D)
    use_a, use_b = inside & (share_a > 0.0)[:, None], inside & (share_b > 0.0)[:, None]
    part_a = tl.load(a + batch * sa_b + head * sa_h + wide * sa_n + dims[None, :], mask=use_a, other=0.0).to(tl.float32)
    part_b = tl.load(b + batch * sb_b + head * sb_h + wide * sb_n + dims[None, :], mask=use_b, other=0.0).to(tl.float32)
    value = part_a * share_a[:, None] + part_b * share_b[:, None]
    value = value / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + batch * so_b + head * so_h + wide * so_n + dims[None, :], value.to(out.dtype.element_ty), mask=inside)
    tl.store(lse + pair * rows + row, tl.where(total == 0.0, float("-inf"), top + tl.log(total)), mask=live)
