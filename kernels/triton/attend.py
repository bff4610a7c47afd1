"""Dense attention with per-key bias, per-head lengths and log sum."""

from __future__ import annotations

import torch

from ..constraints import Limits, Rule
from .attention import Result, run
from .launch import FLOATS, max_head_dim

HEAD_DIM = max_head_dim("q")
UNIT_STRIDE = Rule(
    "the head dimension to have stride 1", lambda call: all(call[name].stride(3) == 1 for name in ("q", "k", "v"))
)
BIAS = Rule("a float32 bias with stride 1", lambda call: call["bias"] is None or _plain_bias(call["bias"]))
LIMITS = Limits("attend", dtypes=FLOATS, rules=(HEAD_DIM, UNIT_STRIDE, BIAS))
why_not = LIMITS.why_not


def _plain_bias(bias: torch.Tensor) -> bool:
    return bias.dtype == torch.float32 and (bias.shape[2] <= 1 or bias.stride(2) == 1)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_lse: bool = False,
) -> Result:
    return run(q, k, v, bias, return_lse, lengths=lengths)
