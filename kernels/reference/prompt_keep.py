"""Keys whose code some query has."""

from __future__ import annotations

import torch

from ..constraints import Limits

LIMITS = Limits("prompt_keep")
why_not = LIMITS.why_not


def prompt_keep(q_codes: torch.Tensor, k_codes: torch.Tensor) -> torch.Tensor:
    kept = (k_codes[..., :, None] == q_codes[..., None, :]).any(-1)
    return kept.any(0) if kept.ndim == 4 else kept
