"""Attention of bucket-sorted query rows over a few key ranges per tile; rows are gathered and scattered by the kernel."""

from __future__ import annotations

import torch

from ..constraints import Limits, Rule
from ..tiles import TileTable
from .attend import BIAS, HEAD_DIM, UNIT_STRIDE
from .attention import Result, run
from .launch import FLOATS

TILE_ROWS = Rule("tiles of at most 128 rows", lambda call: call["tiles"].tile_rows <= 128)
LIMITS = Limits("attend_ranges", dtypes=FLOATS, rules=(HEAD_DIM, UNIT_STRIDE, BIAS, TILE_ROWS))
why_not = LIMITS.why_not


def attend_ranges(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    order: torch.Tensor,
    tiles: TileTable,
    return_lse: bool = False,
) -> Result:
    return run(q, k, v, bias, return_lse, order=order, tiles=tiles)
