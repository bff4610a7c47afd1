"""Tile table in one launch."""

from __future__ import annotations

import torch
import triton

from ..constraints import Limits, Rule
from ..tiles import TileTable, max_tiles
from .launch import launch
from .rows_jit import table_kernel

BLOCK = 32
RULE = Rule("at most 128 buckets", lambda call: call["key_ranges"].shape[2] <= 128)
LIMITS = Limits("tile_table", rules=(RULE,))
why_not = LIMITS.why_not


def tile_table(offsets: torch.Tensor, key_ranges: torch.Tensor, tile_rows: int, num_rows: int) -> TileTable:
    batch, heads, buckets, ranges, _ = key_ranges.shape
    size = max_tiles(num_rows, buckets, tile_rows)
    row_start, row_count = (
        torch.empty(batch, heads, size, dtype=torch.int32, device=offsets.device) for _ in range(2)
    )
    key_start, key_end = (
        torch.empty(batch, heads, size, ranges, dtype=torch.int32, device=offsets.device) for _ in range(2)
    )
    launch(
        table_kernel, (triton.cdiv(size, BLOCK), batch * heads), offsets.device,
        offsets.contiguous(), key_ranges.contiguous(), row_start, row_count, key_start, key_end,
        buckets, size, ranges, tile_rows, BUCKETS=max(2, triton.next_power_of_2(buckets)), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return TileTable(row_start, row_count, key_start, key_end, tile_rows, covers_rows=True)
