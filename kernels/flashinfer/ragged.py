"""Attention of many requests in one call: heads folded into rows, each request a bucket of query rows with its own keys."""

from __future__ import annotations

import functools
import importlib
import math
import threading
from dataclasses import dataclass
from typing import Any

import torch

from ..constraints import Rule
from . import variant

WORKSPACE_BYTES = 128 * 2**20
HIDDEN = -1e5  # a bias of minus infinity would turn to NaN in rows without any other key
EMPTY_BELOW = HIDDEN / 2
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIM = Rule("a head dimension of 64, 128 or 256", lambda call: call["q"].shape[3] in (64, 128, 256))
INDEX_RANGE = Rule("fewer than 2**31 query rows times heads", lambda call: call["q"].shape[:3].numel() < 2**31)

_lock = threading.Lock()  # a wrapper keeps its plan between plan() and run()


@dataclass(frozen=True)
class Request:
    """Query rows (a tensor of row numbers, or None for all) of one head, and the spans of key rows that they see."""

    batch: int
    head: int
    rows: torch.Tensor | None
    spans: list[tuple[int, int]]


@functools.lru_cache(maxsize=4)
def wrapper(device: torch.device, dtype: torch.dtype, head_dim: int) -> Any:
    """FlashInfer's wrapper with our variant; building it compiles, so it is kept like a compiled kernel."""
    generation = "fa3" if torch.cuda.get_device_capability(device)[0] == 9 else "fa2"
    prefill = importlib.import_module("flashinfer.prefill")
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return prefill.BatchPrefillWithRaggedKVCacheWrapper(
        workspace,
        "NHD",
        backend=generation,
        jit_args=variant.jit_args(generation, dtype, head_dim),
        jit_kwargs=variant.jit_kwargs(generation),
    )


def _borders(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts], dtype=torch.int64).cumsum(0).int()


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    requests: list[Request],
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """out [B, Nq, H, D] (and the natural-log sum [B, H, Nq]); rows of no request give 0 and -inf. No request may be empty."""
    batch, rows, heads, dim = q.shape
    out = torch.zeros(batch * rows * heads, dim, dtype=q.dtype, device=q.device)
    lse = torch.full((batch * rows * heads,), -torch.inf, device=q.device)
    if requests:
        q_at, k_at, bias_at = _places(requests, rows, k.shape[1], heads, q.device)
        key_bias = torch.zeros(len(k_at), device=q.device)
        if bias is not None:
            key_bias = bias.float().expand(batch, heads, -1).reshape(-1)[bias_at].clamp_min(HIDDEN) * math.sqrt(dim)
        taken = [t.reshape(-1, dim)[at][:, None] for t, at in ((q, q_at), (k, k_at), (v, k_at))]
        sizes = [rows if r.rows is None else len(r.rows) for r in requests]
        keys = [sum(hi - lo for lo, hi in r.spans) for r in requests]
        part, part_lse = _planned(taken, key_bias, _borders(sizes), _borders(keys))
        empty = part_lse < EMPTY_BELOW
        out[q_at] = torch.where(empty[:, None], 0, part)
        lse[q_at] = torch.where(empty, -torch.inf, part_lse)
    shaped = out.view(q.shape)
    return (shaped, lse.view(batch, rows, heads).transpose(1, 2).contiguous()) if return_lse else shaped


def _planned(
    taken: list[torch.Tensor], key_bias: torch.Tensor, q_borders: torch.Tensor, k_borders: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One plan and one run: (rows [n, D], natural-log sums [n])."""
    q, k, v = taken
    dim, dtype = q.shape[2], q.dtype
    with _lock:
        ragged = wrapper(q.device, dtype, dim)
        ragged.plan(
            q_borders, k_borders, 1, 1, dim, causal=False, q_data_type=dtype, kv_data_type=dtype, o_data_type=dtype
        )
        out, lse = ragged.run(q, k, v, key_bias, 1.0 / math.sqrt(dim), return_lse=True)
    return out[:, 0], lse[:, 0] * math.log(2)  # FlashInfer's log sum has base 2


def _places(
    requests: list[Request], rows: int, keys: int, heads: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of q, of k and v, and of the bias in request order, as numbers into the tensors flattened over all but D."""
    q_at, k_at, bias_at = [], [], []
    for request in requests:
        mine = torch.arange(rows) if request.rows is None else request.rows.long().cpu()
        q_at.append((request.batch * rows + mine) * heads + request.head)
        seen = torch.cat([torch.arange(lo, hi) for lo, hi in request.spans])
        k_at.append((request.batch * keys + seen) * heads + request.head)
        bias_at.append((request.batch * heads + request.head) * keys + seen)
    q_all, k_all, bias_all = (torch.cat(parts).to(device) for parts in (q_at, k_at, bias_at))
    return q_all, k_all, bias_all
