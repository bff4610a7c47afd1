"""Attention over key ranges: one fused call per bucket of query rows.

Tiles that follow each other and see the same keys are joined first: torch's kernels do their own tiling.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..constraints import Limits
from ..tiles import TileTable
from .fused import softmax_attention

LIMITS = Limits("attend_ranges")
why_not = LIMITS.why_not
Spans = list[tuple[int, int]]


def attend_ranges(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    order: torch.Tensor,
    tiles: TileTable,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    batch, rows, heads, _ = q.shape
    out = torch.zeros_like(q)
    lse = q.new_full((batch, heads, rows), -torch.inf, dtype=torch.float32) if return_lse else None
    full = None if bias is None else bias.expand(batch, heads, -1)
    for b, h, start, count, spans in _groups(tiles):
        mine = order[b, h, start : start + count]
        keys, values = _take(k[b, :, h], spans), _take(v[b, :, h], spans)
        part_bias = None if full is None else _take(full[b, h], spans)[None, None]
        part = softmax_attention(
            q[b, :, h].index_select(0, mine)[None, None], keys[None, None], values[None, None], part_bias, return_lse
        )
        out[b, :, h].index_copy_(0, mine.long(), part[0][0, 0])
        if lse is not None and part[1] is not None:
            lse[b, h].index_copy_(0, mine.long(), part[1][0, 0])
    return (out, lse) if lse is not None else out


def _take(rows: torch.Tensor, spans: Spans) -> torch.Tensor:
    """The spans of the first axis; a view when there is one span only."""
    parts = [rows[lo:hi] for lo, hi in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _groups(tiles: TileTable) -> Iterator[tuple[int, int, int, int, Spans]]:
    """(batch row, head, first sorted row, rows, key spans) of joined tiles that have rows and keys."""
    starts, counts, lows, highs = (
        t.tolist() for t in (tiles.row_start, tiles.row_count, tiles.key_start, tiles.key_end)
    )
    for b in range(len(starts)):
        for h in range(len(starts[b])):
            begin, end, spans = 0, 0, []
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
