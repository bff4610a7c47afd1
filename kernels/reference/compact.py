"""Weighted mean of the rows of each slot, in float64."""

from __future__ import annotations

import torch

from ..constraints import Limits

LIMITS = Limits("compact", not_devices=("mps",))
why_not = LIMITS.why_not


def compact(
    x: torch.Tensor, weight: torch.Tensor, group: torch.Tensor, num_slots: int, out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    member = group[..., None, :] == torch.arange(num_slots, device=x.device)[:, None]
    shares = torch.where(member, weight.double()[..., None, :], 0)
    total = shares.sum(-1)
    mean = shares @ x.double().masked_fill((group < 0)[..., None], 0) / torch.where(total == 0, 1, total)[..., None]
    return mean.masked_fill((total == 0)[..., None], 0).to(out_dtype or x.dtype), total.float()
