"""Joins partial attention results, two at a time; what lies between two joins is float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from ..constraints import Limits, Rule
from .launch import FLOATS, launch, padded_dim
from .means_jit import merge_kernel

ROWS = 32
Part = tuple[torch.Tensor, torch.Tensor]
RULES = (
    Rule("a head dimension up to 256", lambda call: call["parts"][0][0].shape[3] <= 256),
    Rule("the head dimension to have stride 1", lambda call: all(out.stride(3) == 1 for out, _ in call["parts"])),
)
LIMITS = Limits("merge_lse", dtypes=FLOATS, rules=RULES)
why_not = LIMITS.why_not


def merge_lse(parts: Sequence[Part]) -> Part:
    dtype = parts[0][0].dtype
    whole = parts[0]
    rest = parts[1:] or [(whole[0], torch.full_like(whole[1], -torch.inf))]  # a lone part may be garbage where it is empty
    for index, part in enumerate(rest):
        whole = _join(whole, part, dtype if index == len(rest) - 1 else torch.float32)
    return whole


def _join(one: Part, other: Part, dtype: torch.dtype) -> Part:
    batch, rows, heads, dim = one[0].shape
    out = torch.empty(one[0].shape, dtype=dtype, device=one[0].device)
    lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=out.device)
    launch(
        merge_kernel, (triton.cdiv(rows, ROWS), batch * heads), out.device,
        one[0], one[1].float().contiguous(), other[0], other[1].float().contiguous(), out, lse,
        *one[0].stride()[:3], *other[0].stride()[:3], *out.stride()[:3], heads, rows,
        D=dim, BLOCK_D=padded_dim(dim), BLOCK_M=ROWS, num_warps=4,
    )  # fmt: skip
    return out, lse
