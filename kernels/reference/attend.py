"""Dense attention with an optional per-key bias, in float64."""

from __future__ import annotations

import torch

from ..constraints import Limits
from .softmax import softmax_out

LIMITS = Limits("attend", not_devices=("mps",))
why_not = LIMITS.why_not


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias.double()[:, :, None, :]
    if lengths is not None:
        gone = torch.arange(k.shape[1], device=k.device) >= lengths[:, :, None]
        scores = scores.masked_fill(gone[:, :, None, :], -torch.inf)
    out, lse = softmax_out(scores, v.double().transpose(1, 2))
    out = out.transpose(1, 2).to(q.dtype)
    return (out, lse.float()) if return_lse else out
