"""Dense attention with a per-key bias: one request per batch row and head."""

from __future__ import annotations

import torch

from ..constraints import Limits
from .ragged import DTYPES, HEAD_DIM, INDEX_RANGE, Request, run

LIMITS = Limits("attend", dtypes=DTYPES, rules=(HEAD_DIM, INDEX_RANGE))
why_not = LIMITS.why_not


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    batch, rows, heads, _ = q.shape
    counts = [[k.shape[1]] * heads] * batch if lengths is None else lengths.tolist()
    requests = [
        Request(b, h, None, [(0, counts[b][h])]) for b in range(batch) for h in range(heads) if counts[b][h] and rows
    ]
    return run(q, k, v, bias, requests, return_lse)
