"""Kernels that go over rows once: hash, counting order, tile table, prompt pruning."""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "bits"], do_not_specialize_on_alignment=["codes"])
def hash_kernel(
    x, mean, planes, codes, sx_b, sx_n, sx_h, sm_b, sm_h, sp_h, heads, rows, bits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, batch * heads). One pass over x; each bit is one float32 sum over the head dimension."""
    pair = tl.program_id(1).to(tl.int64)
    batch, head = pair // heads, pair % heads
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    live = row < rows
    at = x + batch * sx_b + head * sx_h + row.to(tl.int64)[:, None] * sx_n + dims[None, :]
    tile = tl.load(at, mask=live[:, None] & (dims[None, :] < D), other=0.0).to(tl.float32)
    if mean is not None:
        centre = tl.load(mean + batch * sm_b + head * sm_h + dims, mask=dims < D, other=0.0).to(tl.float32)
        tile = tile - centre[None, :]
    code = tl.zeros([BLOCK_M], tl.int32)
    for bit in range(bits):
        plane = tl.load(planes + head * sp_h + dims * bits + bit, mask=dims < D, other=0.0)
        positive = tl.sum(tile * plane[None, :], 1) >= 0.0
        code = code | (positive.to(tl.int32) << bit)
    tl.store(codes + pair * rows + row, code, mask=live)


@triton.jit(do_not_specialize=["rows", "blocks"], do_not_specialize_on_alignment=["codes"])
def count_kernel(codes, counts, rows, blocks, BLOCK: tl.constexpr, BUCKETS: tl.constexpr):
    """Grid (blocks of rows, batch * heads): counts int32 [pair, blocks, BUCKETS] of the codes of each block."""
    pair = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    row = block * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(codes + pair * rows + row, mask=row < rows, other=-1)
    bucket = tl.arange(0, BUCKETS)
    count = tl.sum((code[:, None] == bucket[None, :]).to(tl.int32), 0)
    tl.store(counts + (pair * blocks + block) * BUCKETS + bucket, count)


@triton.jit(do_not_specialize=["rows", "blocks", "buckets"], do_not_specialize_on_alignment=["codes", "order", "offsets"])
def place_kernel(
    codes, counts, order, offsets, rows, blocks, buckets, BLOCK: tl.constexpr, BUCKETS: tl.constexpr, MANY: tl.constexpr
):
    """Grid as above: the place of a row = rows in lower buckets + rows of its bucket in earlier blocks + its rank here."""
    pair = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0)
    bucket = tl.arange(0, BUCKETS)
    total = tl.zeros([BUCKETS], tl.int32)
    earlier = tl.zeros([BUCKETS], tl.int32)
    for first in range(0, blocks, MANY):
        other = first + tl.arange(0, MANY)
        at = counts + (pair * blocks + other.to(tl.int64))[:, None] * BUCKETS + bucket[None, :]
        part = tl.load(at, mask=(other < blocks)[:, None], other=0)
        total += tl.sum(part, 0)
        earlier += tl.sum(tl.where((other < block)[:, None], part, 0), 0)
    begin = tl.cumsum(total, 0) - total
    row = block * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    code = tl.load(codes + pair * rows + row, mask=live, other=-1)
    member = (code[:, None] == bucket[None, :]).to(tl.int32)
    rank = tl.cumsum(member, 0) - member
    place = tl.sum(member * (rank + (begin + earlier)[None, :]), 1)
    tl.store(order + pair * rows + place, row, mask=live & (code >= 0))
    if block == 0:
        tl.store(offsets + pair * (buckets + 1) + bucket, begin, mask=bucket < buckets)
        tl.store(offsets + pair * (buckets + 1) + buckets, tl.sum(total, 0))


@triton.jit(
    do_not_specialize=["buckets", "tiles", "ranges", "tile_rows"],
    do_not_specialize_on_alignment=["offsets", "key_ranges", "row_start", "row_count", "key_start", "key_end"],
)
def table_kernel(
    offsets, key_ranges, row_start, row_count, key_start, key_end, buckets, tiles, ranges, tile_rows,
    BUCKETS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of tiles, batch * heads): cuts buckets into tiles of ``tile_rows`` rows and copies their key ranges."""
    pair = tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = tile < tiles
    bucket = tl.arange(0, BUCKETS)
    known = bucket < buckets
    low = tl.load(offsets + pair * (buckets + 1) + bucket, mask=known, other=0)
    high = tl.load(offsets + pair * (buckets + 1) + bucket + 1, mask=known, other=0)
    need = (high - low + tile_rows - 1) // tile_rows
    last = tl.cumsum(need, 0)
    mine = tl.sum((last[None, :] <= tile[:, None]).to(tl.int32) * known[None, :].to(tl.int32), 1)
    used = inside & (mine < buckets)
    here = mine[:, None] == bucket[None, :]
    first = tl.sum(tl.where(here, (last - need)[None, :], 0), 1)
    start = tl.sum(tl.where(here, low[None, :], 0), 1) + (tile - first) * tile_rows
    count = tl.minimum(tl.sum(tl.where(here, high[None, :], 0), 1) - start, tile_rows)
    at = pair * tiles + tile
    tl.store(row_start + at, tl.where(used, start, 0), mask=inside)
    tl.store(row_count + at, tl.where(used, count, 0), mask=inside)
    for r in range(ranges):
        source = key_ranges + ((pair * buckets + mine) * ranges + r) * 2
        tl.store(key_start + at * ranges + r, tl.load(source, mask=used, other=0), mask=inside)
        tl.store(key_end + at * ranges + r, tl.load(source + 1, mask=used, other=0), mask=inside)


@triton.jit(do_not_specialize=["tables", "queries", "keys"], do_not_specialize_on_alignment=["q_codes", "k_codes", "kept"])
def keep_kernel(
    q_codes, k_codes, kept, tables, pairs, queries, keys, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Grid (blocks of keys, batch * heads): kept uint8 [pair, keys]; codes int32 [table, pair, rows]."""
    pair = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    query = tl.arange(0, BLOCK_Q)
    found = tl.zeros([BLOCK_K], tl.int32)
    for table in range(tables):
        line = tl.cast(table, tl.int64) * pairs + pair
        mine = tl.load(k_codes + line * keys + key, mask=key < keys, other=0)
        for start in range(0, queries, BLOCK_Q):
            use = start + query < queries
            theirs = tl.load(q_codes + line * queries + start + query, mask=use, other=0)
            equal = (mine[:, None] == theirs[None, :]) & use[None, :]
            found = tl.maximum(found, tl.max(equal.to(tl.int32), 1))
    tl.store(kept + pair * keys + key, found.to(tl.uint8), mask=key < keys)
