"""The table that sparse attention walks: which query rows form a tile and which key rows they see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

Spans = list[tuple[int, int]]  # (first, one past the last) key row


@dataclass(frozen=True)
class TileTable:
    """Tiles of bucket-sorted query rows. Device tensors of static size, so nobody has to know how many tiles are in use.

    row_start, row_count: int32 [B, H, T]; tile t covers ``order[b, h, row_start : row_start + row_count]``; unused tiles have
    row_count 0. key_start, key_end: int32 [B, H, T, R]; the tile sees key rows start..end-1 of each range; an unused range has
    key_end <= key_start. Ranges of one tile are disjoint; a key in two of them counts twice. tile_rows bounds row_count.
    covers_rows: every query row is in a tile (so nobody has to fill the results of forgotten rows first).
    """

    row_start: torch.Tensor
    row_count: torch.Tensor
    key_start: torch.Tensor
    key_end: torch.Tensor
    tile_rows: int
    covers_rows: bool = False

    def executed_pairs(self) -> torch.Tensor:
        """Query rows x key rows that are wanted (tile padding left out), summed; int64 scalar on the device."""
        keys = (self.key_end - self.key_start).clamp_min(0).sum(-1, dtype=torch.int64)
        return (keys * self.row_count).sum()


def max_tiles(rows: int, buckets: int, tile_rows: int) -> int:
    """Most tiles that ``rows`` rows in ``buckets`` buckets can need: each bucket may end in one tile that is not full."""
    return rows // tile_rows + min(buckets, rows)


def good_tile_rows(rows: int, buckets: int) -> int:
    """Rows per tile for ``rows`` query rows in ``buckets`` buckets: 128, or 64 where 128 would mostly be padding.

    Work done over work wanted, 4680 rows: 1.10 with 8 buckets and 1.30 with 16 at 128 rows (1.06 and 1.11 at 64); 1560 rows
    in 8 buckets: 1.33 against 1.13. A tile of 64 rows reads keys twice as often, so it has to save a fifth to win.
    """
    return 128 if rows >= 256 * buckets else 64


def joined_tiles(tiles: TileTable) -> Iterator[tuple[int, int, int, int, Spans]]:
    """(batch row, head, first sorted row, rows, key spans) of tiles with rows and keys; neighbours with equal keys are joined.

    Reads the table on the host.
    """
    starts, counts, lows, highs = (
        t.tolist() for t in (tiles.row_start, tiles.row_count, tiles.key_start, tiles.key_end)
    )
    for b in range(len(starts)):
        for h in range(len(starts[b])):
            begin, end = 0, 0
            spans: Spans = []
            for start, count, low, high in zip(starts[b][h], counts[b][h], lows[b][h], highs[b][h]):
                if count == 0:
                    continue
                seen = _joined(low, high)
                if seen == spans and start == end:
                    end += count
                    continue
                if spans and end > begin:
                    yield b, h, begin, end - begin, spans
                begin, end, spans = start, start + count, seen
            if spans and end > begin:
                yield b, h, begin, end - begin, spans


def _joined(low: list[int], high: list[int]) -> Spans:
    """Ranges in row order without the empty ones; ranges that touch become one."""
    spans: Spans = []
    for lo, hi in sorted((lo, hi) for lo, hi in zip(low, high) if hi > lo):
        if spans and spans[-1][1] == lo:
            spans[-1] = (spans[-1][0], hi)
        else:
            spans.append((lo, hi))
    return spans
