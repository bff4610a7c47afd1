"""Best key of every row by matrix products, a bounded part of the score matrix at a time."""

from __future__ import annotations

import torch

from ..constraints import Limits
from ..knobs import score_bytes

LIMITS = Limits("nearest")
why_not = LIMITS.why_not
ZERO_NORM = 1e-12


def prepared(codes: torch.Tensor, scale: torch.Tensor | None, metric: str) -> torch.Tensor:
    """float32 rows; of unit length for cosine."""
    rows = codes.float() if scale is None else codes.float() * scale[..., None]
    return torch.nn.functional.normalize(rows, dim=-1, eps=ZERO_NORM) if metric == "cosine" else rows


def _part(
    q: torch.Tensor, keys: torch.Tensor, valid: torch.Tensor | None, metric: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [G, n, D], keys [G, M, D], valid [G, M] of some heads."""
    score = torch.bmm(q, keys.transpose(1, 2))
    if metric == "l2":
        score = 2 * score - keys.square().sum(-1)[:, None, :]
    if valid is not None:
        score = score.masked_fill_(~valid[:, None, :], -torch.inf)
    top, index = score.max(-1)
    if metric == "l2":
        top = (top - q.square().sum(-1)).clamp_max(0)
    return index.masked_fill(top == -torch.inf, -1), top


def nearest(
    q: torch.Tensor,
    keys: torch.Tensor,
    valid: torch.Tensor | None = None,
    metric: str = "dot",
    q_scale: torch.Tensor | None = None,
    key_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, rows, _ = q.shape
    index = torch.full((batch, heads, rows), -1, dtype=torch.int64, device=q.device)
    score = torch.full((batch, heads, rows), -torch.inf, device=q.device)
    num_keys = keys.shape[2]
    step = max(1, score_bytes() // max(1, 4 * num_keys))
    for b in range(batch if num_keys else 0):
        for h in range(heads):
            one = prepared(keys[b, h], None if key_scale is None else key_scale[b, h], metric)[None]
            usable = None if valid is None else valid[b, h][None]
            if usable is not None:
                one = one.masked_fill(~usable[..., None], 0)
            for at in range(0, rows, step):
                part = slice(at, at + step)
                mine = prepared(q[b, h, part], None if q_scale is None else q_scale[b, h, part], metric)[None]
                index[b, h, part], score[b, h, part] = (t[0] for t in _part(mine, one, usable, metric))
    return index, score
