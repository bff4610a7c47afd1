"""Keys whose code some query has, by comparing all codes: the prompt is short."""

from __future__ import annotations

import torch
import triton

from ..constraints import Limits
from .launch import launch
from .rows_jit import keep_kernel

BLOCK_Q, BLOCK_K = 128, 32
LIMITS = Limits("prompt_keep")
why_not = LIMITS.why_not


def prompt_keep(q_codes: torch.Tensor, k_codes: torch.Tensor) -> torch.Tensor:
    tables = q_codes.shape[0] if q_codes.ndim == 4 else 1
    batch, heads, keys = k_codes.shape[-3:]
    kept = torch.empty(batch, heads, keys, dtype=torch.uint8, device=k_codes.device)
    launch(
        keep_kernel, (triton.cdiv(keys, BLOCK_K), batch * heads), k_codes.device,
        q_codes.contiguous(), k_codes.contiguous(), kept, tables, batch * heads, q_codes.shape[-1], keys,
        BLOCK_Q=BLOCK_Q, BLOCK_K=BLOCK_K, num_warps=4,
    )  # fmt: skip
    return kept.view(torch.bool)
