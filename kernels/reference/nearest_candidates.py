"""Best of a few candidate keys per row, in float64."""

from __future__ import annotations

import torch

from ..constraints import Limits
from .nearest import best, scores, values

LIMITS = Limits("nearest_candidates", not_devices=("mps",))
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
    if keys.shape[2] == 0:
        candidates = candidates[:, :0]
    rows = candidates.long().clamp_min(0)
    usable = (candidates >= 0).expand(*q.shape[:2], -1, -1)
    if valid is not None:
        usable = usable & valid[:, :, rows]
    score = scores(values(q, q_scale)[..., None, :], values(keys, key_scale)[:, :, rows], metric)
    place, top = best(score[..., 0, :], usable)
    padded = torch.nn.functional.pad(rows, (0, 1)).expand(*q.shape[:2], -1, -1)
    chosen = padded.gather(-1, place.clamp_min(0)[..., None])[..., 0]
    return chosen.masked_fill(place < 0, -1), top
