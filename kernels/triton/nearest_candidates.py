"""Nearest of a few candidate keys per row."""

from __future__ import annotations

import torch
import triton

from ..constraints import Limits
from .launch import launch, padded_dim
from .search import DTYPES, HEAD_DIM, UNIT_STRIDE, metric_number, tensors
from .search_jit import candidates_kernel

ROWS = 32
WARPS = 4
LIMITS = Limits("nearest_candidates", dtypes=DTYPES, rules=(HEAD_DIM, UNIT_STRIDE))
why_not = LIMITS.why_not


def nearest_candidates(
    q: torch.Tensor,
    keys: torch.Tensor,
    candidates: torch.Tensor,
    valid: torch.Tensor | None = None,
    metric: str = "dot",
    q_scale: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, dim = q.shape
    given, index, score = tensors(q, valid, q_scale, key_scale)
    launch(
        candidates_kernel, (triton.cdiv(rows, ROWS), batch * heads), q.device,
        q, keys, candidates.int().contiguous(), *given, index, score, *q.stride()[:3], *keys.stride()[:3],
        heads, rows, keys.shape[2], candidates.shape[1],
        METRIC=metric_number(metric), D=dim, BLOCK_D=padded_dim(dim), BLOCK_M=ROWS, num_warps=WARPS, num_stages=2,
    )  # fmt: skip
    return index, score
