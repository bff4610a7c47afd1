"""Weighted mean of the rows of each slot, summed in row order in float32."""

from __future__ import annotations

import torch

from ..constraints import Limits

LIMITS = Limits("compact")
why_not = LIMITS.why_not


def compact(
    x: torch.Tensor, weight: torch.Tensor, group: torch.Tensor, num_slots: int, out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, _, dim = x.shape
    dropped = group < 0
    heads_at = torch.arange(batch * heads, device=x.device).view(batch, heads, 1) * (num_slots + 1)
    slot = (torch.where(dropped, num_slots, group) + heads_at).flatten()  # the last slot of a head takes what is dropped
    slots = batch * heads * (num_slots + 1)
    share = weight.masked_fill(dropped, 0)
    moved = torch.where(dropped[..., None], 0, x.float()) * share[..., None]
    sums, total = _sums(moved.flatten(0, 2), share.flatten(), slot, slots)
    mean = sums / torch.where(total == 0, 1, total)[:, None]
    mean = torch.where((total == 0)[:, None], 0, mean).to(out_dtype or x.dtype)
    return mean.view(batch, heads, -1, dim)[:, :, :num_slots], total.view(batch, heads, -1)[:, :, :num_slots]


def _sums(
    rows: torch.Tensor, share: torch.Tensor, slot: torch.Tensor, slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums per slot in row order. CUDA's index_add_ adds in any order, so there rows are sorted by slot and reduced."""
    if rows.device.type != "cuda":
        sums = rows.new_zeros(slots, rows.shape[1]).index_add_(0, slot, rows)
        return sums, share.new_zeros(slots).index_add_(0, slot, share)
    ordered, order = torch.sort(slot, stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(slots + 1, device=rows.device))
    both = torch.cat([rows, share[:, None]], dim=1)[order]
    both = torch.segment_reduce(both, "sum", offsets=offsets, axis=0, unsafe=True, initial=0)
    return both[:, :-1], both[:, -1]
