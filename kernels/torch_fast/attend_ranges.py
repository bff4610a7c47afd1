"""Attention over key ranges: one fused call per bucket of query rows.

Tiles that follow each other and see the same keys are joined first: torch's kernels do their own tiling.
"""

from __future__ import annotations

import torch

from ..constraints import Limits
from ..tiles import Spans, TileTable, joined_tiles
from .fused import softmax_attention

LIMITS = Limits("attend_ranges")
why_not = LIMITS.why_not


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
    for b, h, start, count, spans in joined_tiles(tiles):
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
