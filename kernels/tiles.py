"""The table that sparse attention walks: which query rows form a tile and which key rows they see."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TileTable:
    """Tiles of bucket-sorted query rows. Device tensors of static size, so nobody has to know how many tiles are in use.

    row_start, row_count: int32 [B, H, T]; tile t covers ``order[b, h, row_start : row_start + row_count]``; unused tiles have
    row_count 0. key_start, key_end: int32 [B, H, T, R]; the tile sees key rows start..end-1 of each range; an unused range has
    key_end <= key_start. Ranges of one tile are disjoint; a key in two of them counts twice. tile_rows bounds row_count.
    """

    row_start: torch.Tensor
    row_count: torch.Tensor
    key_start: torch.Tensor
    key_end: torch.Tensor
    tile_rows: int

    def executed_pairs(self) -> torch.Tensor:
        """Query rows x key rows that are wanted (tile padding left out), summed; int64 scalar on the device."""
        keys = (self.key_end - self.key_start).clamp_min(0).sum(-1, dtype=torch.int64)
        return (keys * self.row_count).sum()


def max_tiles(rows: int, buckets: int, tile_rows: int) -> int:
    """Most tiles that ``rows`` rows in ``buckets`` buckets can need: each bucket may end in one tile that is not full."""
    return rows // tile_rows + min(buckets, rows)
