"""The attention kernels. One program = one tile of query rows of one head; it walks one or a few contiguous ranges of key rows.

Addresses: a 64-bit row base per step plus 32-bit offsets inside of the tile. Softmax in base 2 and float32; the log-count bias is
one float32 load per key. Strides are in elements, the head dimension has stride 1.
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _walk(
    acc, peak, total, q, k_ptr, v_ptr, k_desc, v_desc, bias_ptr, stride_k, stride_v, batch, head, lo, hi, scale,
    HAS_BIAS: tl.constexpr, DESC: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax over key rows lo..hi-1; with DESC hi - lo has to be a multiple of BLOCK_N.

    V is loaded after the scores: loaded earlier, its registers would be held across them and spill.
    """
    dims = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_N)
    k_tile = keys[None, :] * stride_k + dims[:, None]
    v_tile = keys[:, None] * stride_v + dims[None, :]
    for start in range(lo, hi, BLOCK_N):
        use = start + keys < hi
        k_at = k_ptr + tl.cast(start, tl.int64) * stride_k + k_tile
        if DESC:
            k = tl.reshape(k_desc.load([batch, start, head, 0]), (BLOCK_N, BLOCK_D)).T
        elif D == BLOCK_D:
            k = tl.load(k_at, mask=use[None, :], other=0.0)
        else:
            k = tl.load(k_at, mask=use[None, :] & (dims[:, None] < D), other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_BIAS:
            scores += tl.load(bias_ptr + start + keys, mask=use, other=0.0)[None, :] * LOG2E
        if not DESC:
            scores = tl.where(use[None, :], scores, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        safe = tl.where(top == float("-inf"), 0.0, top) if HAS_BIAS else top
        p = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(p, 1)
        v_at = v_ptr + tl.cast(start, tl.int64) * stride_v + v_tile
        if DESC:
            v = tl.reshape(v_desc.load([batch, start, head, 0]), (BLOCK_N, BLOCK_D))
        elif D == BLOCK_D:
            v = tl.load(v_at, mask=use[:, None], other=0.0)
        else:
            v = tl.load(v_at, mask=use[:, None] & (dims[None, :] < D), other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = top
    return acc, peak, total


@triton.jit(
    do_not_specialize=["sb_b", "sb_h", "rows", "num_keys", "tiles", "ranges"],
    do_not_specialize_on_alignment=["bias", "order", "row_start", "row_count", "key_start", "key_end", "lengths", "lse"],
)
def attend_kernel(
    q, k, v, k_desc, v_desc, bias, order, row_start, row_count, key_start, key_end, lengths, out, lse,
    sq_b, sq_n, sq_h, sk_b, sk_n, sk_h, sv_b, sv_n, sv_h, so_b, so_n, so_h, sb_b, sb_h,
    heads, rows, num_keys, tiles, ranges, scale,
    RANGED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LENGTHS: tl.constexpr, HAS_LSE: tl.constexpr, DESC: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, batch * heads). RANGED: rows come through ``order`` and the tile table; else rows in their order, all keys
    or the first ``lengths`` of the head. ``scale`` holds log2(e) / sqrt(D).
    """
    tile = tl.program_id(0)
    pair = tl.program_id(1)
    batch, head = pair // heads, pair % heads
    at = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    if RANGED:
        slot = pair.to(tl.int64) * tiles + tile
        count = tl.load(row_count + slot)
        if count == 0:
            return
        first = tl.load(row_start + slot)
        live = at < count
        row = tl.load(order + pair.to(tl.int64) * rows + first + at, mask=live, other=0)
    else:
        row = tile * BLOCK_M + at
        live = row < rows
    b64, h64 = batch.to(tl.int64), head.to(tl.int64)
    inside = live[:, None] if D == BLOCK_D else live[:, None] & (dims[None, :] < D)
    q_at = q + b64 * sq_b + h64 * sq_h + row.to(tl.int64)[:, None] * sq_n + dims[None, :]
    q_tile = tl.load(q_at, mask=inside, other=0.0)
    k_base = k + b64 * sk_b + h64 * sk_h
    v_base = v + b64 * sv_b + h64 * sv_h
    bias_base = bias
    if HAS_BIAS:
        bias_base = bias + b64 * sb_b + h64 * sb_h
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    steps = ranges if RANGED else 1
    for r in range(steps):
        if RANGED:
            lo = tl.load(key_start + slot * ranges + r)
            hi = tl.load(key_end + slot * ranges + r)
        else:
            lo = 0
            hi = num_keys
            if HAS_LENGTHS:
                hi = tl.minimum(tl.load(lengths + pair), num_keys)
        if DESC:  # descriptors read whole tiles; what is behind the range must not come in, so the rest goes by pointers
            full = lo + tl.maximum(hi - lo, 0) // BLOCK_N * BLOCK_N
            acc, peak, total = _walk(
                acc, peak, total, q_tile, k_base, v_base, k_desc, v_desc, bias_base, sk_n, sv_n, batch, head, lo, full, scale,
                HAS_BIAS, True, D, BLOCK_D, BLOCK_N, PRECISION,
            )  # fmt: skip
            lo = full
        acc, peak, total = _walk(
            acc, peak, total, q_tile, k_base, v_base, k_desc, v_desc, bias_base, sk_n, sv_n, batch, head, lo, hi, scale,
            HAS_BIAS, False, D, BLOCK_D, BLOCK_N, PRECISION,
        )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = out + b64 * so_b + h64 * so_h + row.to(tl.int64)[:, None] * so_n + dims[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=inside)
    if HAS_LSE:
        value = tl.where(total == 0.0, float("-inf"), (peak + tl.log2(total)) * LN2)
        tl.store(lse + pair.to(tl.int64) * rows + row, value, mask=live)
