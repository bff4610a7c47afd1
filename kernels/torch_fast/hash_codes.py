"""Sign hash in float32."""

from __future__ import annotations

import torch

from ..constraints import Limits
from ..knobs import score_bytes

LIMITS = Limits("hash_codes")
why_not = LIMITS.why_not


def hash_codes(x: torch.Tensor, mean: torch.Tensor | None, planes: torch.Tensor) -> torch.Tensor:
    batch, _, heads, dim = x.shape
    bits = planes.shape[2]
    shift = torch.arange(bits, device=x.device, dtype=torch.int32)
    step = max(1, score_bytes() // max(1, batch * heads * dim * bits * 4))
    codes = []
    for part in x.split(step, dim=1):
        centred = part.float() if mean is None else part.float() - mean.float()[:, None]
        centred = centred.transpose(1, 2)
        product = torch.matmul(centred, planes) if x.device.type == "cpu" else _folded(centred, planes)
        codes.append(((product >= 0).int() << shift).sum(-1, dtype=torch.int32))
    return torch.cat(codes, dim=2) if codes else x.new_zeros((batch, heads, 0), dtype=torch.int32)


def _folded(rows: torch.Tensor, planes: torch.Tensor) -> torch.Tensor:
    """Products summed by halving, the same order for every batch and row count; no TF32, whatever the process allows.

    On the CPU a matrix product does: it is ten times faster there and adds one row's products in the same order whatever else
    is in the batch.
    """
    products = rows[..., None, :] * planes.transpose(1, 2)[:, None]
    count = products.shape[-1]
    while count > 1:
        half = (count + 1) // 2
        products[..., : count - half] += products[..., half:count]
        count = half
    return products[..., 0]
