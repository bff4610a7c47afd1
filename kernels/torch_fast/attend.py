"""Dense attention through torch's fused kernels.

The query rows are walked in chunks when the device would fall back to a full score matrix, so that the largest temporary stays
below MAX_SCORE_BYTES (users of some devices lose runs to one 60 GB request).
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

MAX_SCORE_BYTES = 256 * 2**20
SCORE_ELEMENT_BYTES = 4


def why_not(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> str | None:
    if k.shape[1] == 0:
        return "there are no keys to attend to"
    return None


def _rows_per_chunk(q: torch.Tensor, num_keys: int) -> int:
    per_row = q.shape[0] * q.shape[2] * num_keys * SCORE_ELEMENT_BYTES
    return max(1, MAX_SCORE_BYTES // per_row)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """softmax(q k^T / sqrt(d) + bias) v for [B, N, H, D] tensors; bias broadcasts to [B, H, keys]."""
    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    mask = None if bias is None else bias[:, :, None, :].to(q.dtype)
    rows = _rows_per_chunk(q, k.shape[1])
    parts = []
    for chunk in qt.split(rows, dim=2):
        part_mask = mask
        if mask is not None:
            part_mask = mask.expand(mask.shape[0], mask.shape[1], chunk.shape[2], mask.shape[3])
        parts.append(scaled_dot_product_attention(chunk, kt, vt, attn_mask=part_mask))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return out.transpose(1, 2)
