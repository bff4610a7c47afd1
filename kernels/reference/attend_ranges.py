"""Attention of sorted query rows over key ranges: a loop over tiles, in float64."""

from __future__ import annotations

import torch

from ..constraints import Limits
from ..tiles import TileTable
from .softmax import softmax_out

LIMITS = Limits("attend_ranges", not_devices=("mps",))
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
    batch, rows, heads, dim = q.shape
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float64, device=q.device)
    if bias is not None:
        bias = bias.expand(batch, heads, -1)
    for b, h, t in torch.cartesian_prod(*(torch.arange(n) for n in tiles.row_start.shape)).tolist():
        start, count = int(tiles.row_start[b, h, t]), int(tiles.row_count[b, h, t])
        spans = zip(tiles.key_start[b, h, t].tolist(), tiles.key_end[b, h, t].tolist())
        keys = torch.cat([torch.arange(lo, max(lo, hi), device=q.device) for lo, hi in spans])
        if count == 0 or len(keys) == 0:
            continue
        mine = order[b, h, start : start + count].long()
        scores = q[b, mine, h].double() @ k[b, keys, h].double().T / dim**0.5
        if bias is not None:
            scores = scores + bias[b, h, keys].double()
        out[b, mine, h], lse[b, h, mine] = softmax_out(scores, v[b, keys, h].double())
    return (out.to(q.dtype), lse.float()) if return_lse else out.to(q.dtype)
