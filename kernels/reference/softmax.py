"""Softmax in float64 that is defined for rows without keys."""

from __future__ import annotations

import torch


def softmax_out(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(softmax(scores) values, log-sum-exp) of scores [..., n, m] and values [..., m, d]; 0 and -inf where no score is finite.

    A key that no row can see does not count, NaN included.
    """
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0, lse)[..., None])
    seen = (scores > -torch.inf).any(-2)
    return weights @ values.masked_fill(~seen[..., None], 0), lse
