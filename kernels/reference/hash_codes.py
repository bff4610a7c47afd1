"""Sign hash: projections in float64 of the float32 difference to the mean."""

from __future__ import annotations

import torch

from ..constraints import Limits

LIMITS = Limits("hash_codes", not_devices=("mps",))
why_not = LIMITS.why_not


def hash_codes(x: torch.Tensor, mean: torch.Tensor | None, planes: torch.Tensor) -> torch.Tensor:
    centred = x.float() if mean is None else x.float() - mean.float()[:, None]
    planes = planes.double().expand(x.shape[2], -1, -1)
    positive = torch.einsum("bnhd,hdk->bhnk", centred.double(), planes) >= 0
    return (positive * 2 ** torch.arange(planes.shape[2], device=x.device)).sum(-1, dtype=torch.int32)
