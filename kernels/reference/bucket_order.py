"""Rows listed bucket by bucket."""

from __future__ import annotations

import torch

from ..constraints import Limits

LIMITS = Limits("bucket_order")
why_not = LIMITS.why_not


def bucket_order(codes: torch.Tensor, num_buckets: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads = codes.shape[:2]
    order = torch.empty_like(codes)
    offsets = torch.zeros(batch, heads, num_buckets + 1, dtype=torch.int32, device=codes.device)
    for b in range(batch):
        for h in range(heads):
            parts = [(codes[b, h] == c).nonzero()[:, 0] for c in range(num_buckets)]
            order[b, h] = torch.cat(parts).int()
            offsets[b, h, 1:] = torch.tensor([len(part) for part in parts]).cumsum(0)
    return order, offsets
