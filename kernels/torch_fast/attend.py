"""Dense attention through torch's fused kernels."""

from __future__ import annotations

import torch

from ..constraints import Limits
from .fused import softmax_attention

LIMITS = Limits("attend")
why_not = LIMITS.why_not


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    if lengths is None:
        out, lse = softmax_attention(qt, kt, vt, bias, return_lse)
    else:
        out, lse = _by_length(qt, kt, vt, bias, lengths, return_lse)
    out = out.transpose(1, 2)
    return (out, lse) if lse is not None else out


def _by_length(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    lengths: torch.Tensor,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One call when all heads have the same length, else one per batch row and head on views: rows past it are never read."""
    wanted = lengths.tolist()
    if len({n for row in wanted for n in row}) == 1:
        n = wanted[0][0]
        return softmax_attention(q, k[:, :, :n], v[:, :, :n], None if bias is None else bias[..., :n], return_lse)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32) if return_lse else None
    full = None if bias is None else bias.expand(q.shape[0], q.shape[1], -1)
    for b, row in enumerate(wanted):
        for h, n in enumerate(row):
            at = (slice(b, b + 1), slice(h, h + 1))
            keys = (*at, slice(0, n))
            part = softmax_attention(q[at], k[keys], v[keys], None if full is None else full[keys], return_lse)
            out[at] = part[0]
            if lse is not None and part[1] is not None:
                lse[at] = part[1]
    return out, lse
