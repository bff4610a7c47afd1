"""Keys whose code some query has, by a sorted look-up."""

from __future__ import annotations

import torch

from ..constraints import Limits

LIMITS = Limits("prompt_keep")
why_not = LIMITS.why_not


def prompt_keep(q_codes: torch.Tensor, k_codes: torch.Tensor) -> torch.Tensor:
    if q_codes.shape[-1] == 0:
        kept = torch.zeros_like(k_codes, dtype=torch.bool)
    else:
        ordered = q_codes.sort(-1).values
        place = torch.searchsorted(ordered, k_codes.contiguous()).clamp_max(ordered.shape[-1] - 1)
        kept = ordered.gather(-1, place) == k_codes
    return kept.any(0) if kept.ndim == 4 else kept
