"""Joins partial attention results in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..constraints import Limits

LIMITS = Limits("merge_lse")
why_not = LIMITS.why_not


def merge_lse(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    top = parts[0][1]
    for _, lse in parts[1:]:
        top = torch.maximum(top, lse)
    top = torch.where(top.isinf(), 0, top)
    out = torch.zeros(parts[0][0].shape, dtype=torch.float32, device=top.device)
    total = torch.zeros_like(top)
    for part, lse in parts:
        share = torch.exp(lse - top)
        total = total + share
        share = share.transpose(1, 2)[..., None]
        out = out + torch.where(share > 0, part.float() * share, 0)
    whole = torch.where(total == 0, 1, total).transpose(1, 2)[..., None]
    return (out / whole).to(parts[0][0].dtype), top + torch.log(total)
