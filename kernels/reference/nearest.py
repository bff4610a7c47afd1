"""Best key of every row, in float64, with the whole score matrix."""

from __future__ import annotations

import torch

from ..constraints import Limits

LIMITS = Limits("nearest", not_devices=("mps",))
why_not = LIMITS.why_not


def values(codes: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return codes.double() if scale is None else codes.double() * scale.double()[..., None]


def scores(q: torch.Tensor, keys: torch.Tensor, metric: str) -> torch.Tensor:
    """[..., N, M] of q [..., N, D] and keys [..., M, D]."""
    if metric == "l2":
        return -(q[..., :, None, :] - keys[..., None, :, :]).square().sum(-1)
    if metric == "cosine":
        q, keys = (torch.nn.functional.normalize(t, dim=-1, eps=1e-12) for t in (q, keys))
    return q @ keys.transpose(-1, -2)


def best(score: torch.Tensor, usable: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(index, score) of the largest usable score along the last axis, the first one on ties, -1 and -inf without any."""
    score = score.masked_fill(~usable, -torch.inf)
    if score.shape[-1] == 0:
        score = torch.nn.functional.pad(score, (0, 1), value=-torch.inf)
    top = score.amax(-1, keepdim=True)
    index = (score == top).int().argmax(-1).masked_fill(top[..., 0].isinf(), -1)
    return index, top[..., 0].float()


def nearest(
    q: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor | None = None,
    metric: str = "dot",
    q_scale: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    usable = torch.ones(keys.shape[:3], dtype=torch.bool, device=q.device) if valid is None else valid
    return best(scores(values(q, q_scale), values(keys, key_scale), metric), usable[:, :, None])
