"""Counting order in two launches: counts per block of rows, then every row to its place. No atomics, so it is stable."""

from __future__ import annotations

import torch
import triton

from ..constraints import Limits, Rule
from .launch import launch
from .rows_jit import count_kernel, place_kernel

CELLS = 8192  # rows x buckets that one program compares at once
MANY = 16
LIMITS = Limits("bucket_order", rules=(Rule("at most 128 buckets", lambda call: call["num_buckets"] <= 128),))
why_not = LIMITS.why_not


def bucket_order(codes: torch.Tensor, num_buckets: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows = codes.shape
    codes = codes.contiguous()
    width = max(2, triton.next_power_of_2(num_buckets))
    block = min(512, CELLS // width)
    blocks = max(1, triton.cdiv(rows, block))
    order = torch.empty_like(codes)
    offsets = torch.empty(batch, heads, num_buckets + 1, dtype=torch.int32, device=codes.device)
    counts = torch.empty(batch * heads, blocks, width, dtype=torch.int32, device=codes.device)
    grid = (blocks, batch * heads)
    launch(count_kernel, grid, codes.device, codes, counts, rows, blocks, BLOCK=block, BUCKETS=width, num_warps=4)
    launch(
        place_kernel, grid, codes.device, codes, counts, order, offsets, rows, blocks, num_buckets,
        BLOCK=block, BUCKETS=width, MANY=MANY, num_warps=4,
    )  # fmt: skip
    return order, offsets
