"""Stable counting order through torch's sort."""

from __future__ import annotations

import torch

from ..constraints import Limits

LIMITS = Limits("bucket_order")
why_not = LIMITS.why_not


def bucket_order(codes: torch.Tensor, num_buckets: int) -> tuple[torch.Tensor, torch.Tensor]:
    ordered, order = torch.sort(codes, dim=-1, stable=True)
    borders = torch.arange(num_buckets + 1, dtype=torch.int32, device=codes.device)
    borders = borders.expand(*codes.shape[:2], -1).contiguous()
    return order.int(), torch.searchsorted(ordered, borders, out_int32=True)
