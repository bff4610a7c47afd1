"""Cuts each bucket of query rows into tiles."""

from __future__ import annotations

import torch

from ..constraints import Limits
from ..tiles import TileTable, max_tiles

LIMITS = Limits("tile_table")
why_not = LIMITS.why_not


def tile_table(offsets: torch.Tensor, key_ranges: torch.Tensor, tile_rows: int, num_rows: int) -> TileTable:
    batch, heads, buckets, ranges, _ = key_ranges.shape
    size = (batch, heads, max_tiles(num_rows, buckets, tile_rows))
    rows = torch.zeros(*size, 2, dtype=torch.int32)
    keys = torch.zeros(*size, ranges, 2, dtype=torch.int32)
    for b in range(batch):
        for h in range(heads):
            cuts = [
                (start, min(tile_rows, hi - start), c)
                for c, (lo, hi) in enumerate(zip(offsets[b, h, :-1].tolist(), offsets[b, h, 1:].tolist()))
                for start in range(lo, hi, tile_rows)
            ]
            for t, (start, count, c) in enumerate(cuts):
                rows[b, h, t] = torch.tensor([start, count])
                keys[b, h, t] = key_ranges[b, h, c].cpu()
    first, count, low, high = (
        part.contiguous().to(offsets.device) for part in (rows[..., 0], rows[..., 1], keys[..., 0], keys[..., 1])
    )
    return TileTable(first, count, low, high, tile_rows, covers_rows=True)
