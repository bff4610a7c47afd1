"""Segment means: torch sorts the rows by slot (stable), one kernel adds each slot's rows in row order."""

from __future__ import annotations

import torch
import triton

from ..constraints import Limits, Rule
from .launch import FLOATS, launch, padded_dim
from .means_jit import means_kernel

SLOTS = 16
RULES = (
    Rule("a head dimension up to 256", lambda call: call["x"].shape[3] <= 256),
    Rule("the head dimension to have stride 1", lambda call: call["x"].stride(3) == 1),
)
LIMITS = Limits("compact", dtypes=FLOATS, rules=RULES)
why_not = LIMITS.why_not


def compact(
    x: torch.Tensor, weight: torch.Tensor, group: torch.Tensor, num_slots: int, out_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, dim = x.shape
    ordered, order = torch.sort(group.int(), dim=-1, stable=True)  # dropped rows (-1) come first and lie before every offset
    borders = torch.arange(num_slots + 1, dtype=torch.int32, device=x.device).expand(batch, heads, -1).contiguous()
    offsets = torch.searchsorted(ordered, borders, out_int32=True)
    mean = torch.empty(batch, heads, num_slots, dim, dtype=out_dtype or x.dtype, device=x.device)
    total = torch.empty(batch, heads, num_slots, dtype=torch.float32, device=x.device)
    launch(
        means_kernel, (triton.cdiv(num_slots, SLOTS), batch * heads), x.device,
        x, weight.contiguous(), order, offsets, mean, total, *x.stride()[:3], heads, rows, num_slots,
        D=dim, BLOCK_D=padded_dim(dim), BLOCK_S=SLOTS, num_warps=4,
    )  # fmt: skip
    return mean, total
