"""What the two searches share: limits and the tensors in the form that the kernels take."""

from __future__ import annotations

import torch

from ..constraints import Rule
from ..ops import METRICS
from .launch import FLOATS, max_head_dim

DTYPES = (*FLOATS, torch.int8)
HEAD_DIM = max_head_dim("q")
UNIT_STRIDE = Rule("the head dimension to have stride 1", lambda call: call["q"].stride(3) == call["keys"].stride(3) == 1)


def tensors(
    q: torch.Tensor, valid: torch.Tensor | None, q_scale: torch.Tensor | None, key_scale: torch.Tensor | None
) -> tuple[tuple[torch.Tensor | None, ...], torch.Tensor, torch.Tensor]:
    """((valid, q_scale, key_scale) contiguous, index, score) with the results not yet filled."""
    given = (
        None if valid is None else valid.contiguous().view(torch.uint8),
        None if q_scale is None else q_scale.contiguous(),
        None if key_scale is None else key_scale.contiguous(),
    )
    index = torch.empty(q.shape[:3], dtype=torch.int64, device=q.device)
    return given, index, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def metric_number(metric: str) -> int:
    return METRICS.index(metric)
