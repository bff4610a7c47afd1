"""Dense attention with an optional per-key bias, in float64."""

from __future__ import annotations

import torch


def why_not(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    if q.device.type == "mps":
        return "float64 does not exist on mps"
    return None


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """softmax(q k^T / sqrt(d) + bias) v for [B, N, H, D] tensors; bias broadcasts to [B, H, keys]."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias.double()[:, :, None, :]
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.double()).to(q.dtype)
