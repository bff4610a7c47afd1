"""Best of a few candidate keys per row: one gather and one product per candidate, nothing larger than the rows is held."""

from __future__ import annotations

import torch

from ..constraints import Limits
from .nearest import prepared

LIMITS = Limits("nearest_candidates")
why_not = LIMITS.why_not


def nearest_candidates(
    q: torch.Tensor,
    keys: torch.Tensor,
    candidates: torch.Tensor,
    valid: torch.Tensor | None = None,
    metric: str = "dot",
    q_scale: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.full(q.shape[:3], -1, dtype=torch.int64, device=q.device)
    score = torch.full(q.shape[:3], -torch.inf, device=q.device)
    if keys.shape[2] == 0:
        return index, score
    rows = prepared(q, q_scale, metric)
    pool = prepared(keys, key_scale, metric)
    for column in candidates.T:
        at = column.clamp_min(0)
        found = pool.index_select(2, at)
        new = -(rows - found).square().sum(-1) if metric == "l2" else (rows * found).sum(-1)
        usable = column >= 0
        if valid is not None:
            usable = usable & valid.index_select(2, at)
        better = usable & (new > score)
        score = torch.where(better, new, score)
        index = torch.where(better, at.long(), index)
    return index, score
