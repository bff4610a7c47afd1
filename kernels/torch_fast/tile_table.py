"""Cuts each bucket of query rows into tiles, on the device."""

from __future__ import annotations

import torch

from ..constraints import Limits
from ..tiles import TileTable, max_tiles

LIMITS = Limits("tile_table")
why_not = LIMITS.why_not


def tile_table(offsets: torch.Tensor, key_ranges: torch.Tensor, tile_rows: int, num_rows: int) -> TileTable:
    batch, heads, buckets, ranges, _ = key_ranges.shape
    size = max_tiles(num_rows, buckets, tile_rows)
    lows, highs = offsets[..., :-1], offsets[..., 1:]
    per_bucket = (highs - lows + tile_rows - 1) // tile_rows
    last = per_bucket.cumsum(-1)  # tiles up to and including each bucket
    tile = torch.arange(size, device=offsets.device).expand(batch, heads, -1).contiguous()
    bucket = torch.searchsorted(last, tile, right=True).clamp_max(buckets - 1)
    used = tile < last[..., -1:]
    start = lows.gather(-1, bucket) + (tile - (last - per_bucket).gather(-1, bucket)) * tile_rows
    count = (highs.gather(-1, bucket) - start).clamp_max(tile_rows)
    index = bucket[..., None, None].expand(-1, -1, -1, ranges, 2)
    keys = torch.where(used[..., None, None], key_ranges.gather(2, index), 0)
    start, count = torch.where(used, start, 0), torch.where(used, count, 0)
    lows, highs = (keys[..., side].contiguous() for side in (0, 1))
    return TileTable(start.int(), count.int(), lows, highs, tile_rows, covers_rows=True)
