"""Joins partial attention results, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..constraints import Limits

LIMITS = Limits("merge_lse", not_devices=("mps",))
why_not = LIMITS.why_not


def merge_lse(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    lses = torch.stack([lse.double() for _, lse in parts])
    total = torch.logsumexp(lses, 0)
    share = torch.exp(lses - torch.where(total.isinf(), 0, total)).transpose(2, 3)[..., None]
    outs = torch.stack([out.double() for out, _ in parts])
    out = torch.where(share > 0, outs * share, 0).sum(0)
    return out.to(parts[0][0].dtype), total.float()
