"""Nearest key of every row."""

from __future__ import annotations

import torch
import triton

from ..constraints import Limits
from .launch import arch, launch, padded_dim
from .search import DTYPES, HEAD_DIM, UNIT_STRIDE, metric_number, tensors
from .search_jit import nearest_kernel
from .shapes import search_shape

LIMITS = Limits("nearest", dtypes=DTYPES, rules=(HEAD_DIM, UNIT_STRIDE))
why_not = LIMITS.why_not


def nearest(
    q: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor | None = None,
    metric: str = "dot",
    q_scale: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, dim = q.shape
    given, index, score = tensors(q, valid, q_scale, key_scale)
    shape = search_shape(arch(q.device), q.dtype, padded_dim(dim))
    launch(
        nearest_kernel, (triton.cdiv(rows, shape.rows), batch * heads), q.device,
        q, keys, *given, index, score, *q.stride()[:3], *keys.stride()[:3], heads, rows, keys.shape[2],
        METRIC=metric_number(metric), D=dim, BLOCK_D=padded_dim(dim), BLOCK_M=shape.rows, BLOCK_N=shape.keys,
        PRECISION=shape.precision, **shape.options(),
    )  # fmt: skip
    return index, score
