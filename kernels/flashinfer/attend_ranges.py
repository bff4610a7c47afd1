"""Attention over key ranges: one request per bucket of query rows; its keys are gathered to lie side by side."""

from __future__ import annotations

import torch

from ..constraints import Limits
from ..tiles import TileTable, joined_tiles
from .ragged import DTYPES, HEAD_DIM, INDEX_RANGE, Request, run

LIMITS = Limits("attend_ranges", dtypes=DTYPES, rules=(HEAD_DIM, INDEX_RANGE))
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
    placed = order.cpu()
    requests = [
        Request(b, h, placed[b, h, start : start + count], spans) for b, h, start, count, spans in joined_tiles(tiles)
    ]
    return run(q, k, v, bias, requests, return_lse)
