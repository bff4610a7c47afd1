"""Sign hash, one pass over the rows."""

from __future__ import annotations

import torch
import triton

from ..constraints import Limits, Rule
from .launch import FLOATS, launch, padded_dim
from .rows_jit import hash_kernel

ROWS = 32
RULES = (
    Rule("a head dimension up to 256", lambda call: call["x"].shape[3] <= 256),
    Rule("the head dimension to have stride 1", lambda call: call["x"].stride(3) == 1),
)
LIMITS = Limits("hash_codes", dtypes=FLOATS, rules=RULES)
why_not = LIMITS.why_not


def hash_codes(x: torch.Tensor, mean: torch.Tensor | None, planes: torch.Tensor) -> torch.Tensor:
    batch, rows, heads, dim = x.shape
    codes = torch.empty(batch, heads, rows, dtype=torch.int32, device=x.device)
    planes = planes.contiguous()
    mean_strides = (0, 0)
    if mean is not None:
        mean = mean.contiguous()
        mean_strides = (0 if mean.shape[0] == 1 else mean.stride(0), mean.stride(1))
    launch(
        hash_kernel, (triton.cdiv(rows, ROWS), batch * heads), x.device,
        x, mean, planes, codes, *x.stride()[:3], *mean_strides, 0 if planes.shape[0] == 1 else planes.stride(0),
        heads, rows, planes.shape[2], D=dim, BLOCK_D=padded_dim(dim), BLOCK_M=ROWS, num_warps=4,
    )  # fmt: skip
    return codes
