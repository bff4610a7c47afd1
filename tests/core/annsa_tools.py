"""Rows with planted clusters, and calls of sparse attention outside a model."""

from __future__ import annotations

import torch
from torch import Tensor

from fastar_pack.fastar_core.annsa import AnnSASettings, SparseAttention
from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.key_rows import KeyRows, frame_parts
from fastar_pack.kernels import registry

SCHEDULE = (1.0, 0.9, 0.7, 0.4)
ROWS, COLS = 4, 4
TOKENS = ROWS * COLS
SPARSE = AnnSASettings(density=0.4, key_buckets=16, query_buckets=4, recent_frames=1, only_if_faster=False)


def context(start: int, count: int = 2, sigma: float | tuple[float, ...] = 0.7, phase: str = "denoise", step: int = 1) -> FwdCtx:
    sigmas = sigma if isinstance(sigma, tuple) else (sigma,) * count
    times = tuple(1000 * s for s in sigmas)
    return FwdCtx(phase, start, count, sigmas, times, ROWS, COLS, step, start // count)


def key_rows(layer: int, ctx: FwdCtx, owner: object = "a", sink: int = 1) -> KeyRows:
    return KeyRows(layer, ctx, owner, frame_parts(list(range(ctx.end)), ctx.tokens_per_frame), sink)


def planted(frames: int, own: int = 2, clusters: int = 8, heads: int = 2, dim: int = 24, batch: int = 1, seed: int = 0,
            sharpness: float = 30.0) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, own * S, H, D] and k, v [B, frames * S, H, D]: every row lies near one of ``clusters`` directions, queries sharply so."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.nn.functional.normalize(torch.randn(heads, clusters, dim, generator=g), dim=-1)

    def rows(count: int, scale: float) -> Tensor:
        which = torch.randint(clusters, (batch, count, heads), generator=g)
        picked = torch.stack([centres[h][which[..., h]] for h in range(heads)], 2)
        return scale * (picked + 0.05 * torch.randn(batch, count, heads, dim, generator=g))

    size = dim ** 0.25
    q, k = rows(own * TOKENS, sharpness ** 0.5 * size), rows(frames * TOKENS, sharpness ** 0.5 * size)
    return q, k, torch.randn(batch, frames * TOKENS, heads, dim, generator=g)


def dense(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    return registry.call("attend", "auto", q, k, v, bias)


def run(settings: AnnSASettings, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, rows: KeyRows | None = None,
        sparse: SparseAttention | None = None) -> tuple[Tensor | None, SparseAttention]:
    sparse = sparse or SparseAttention(settings, SCHEDULE)
    rows = rows or key_rows(0, context(k.shape[1] // TOKENS - q.shape[1] // TOKENS, q.shape[1] // TOKENS))
    if rows.layer == 0:
        sparse.start_call((rows.ctx.block, rows.ctx.start), rows.ctx.commits)
    return sparse.attend(q, k, v, bias, rows, dense), sparse


def error(out: Tensor | None, truth: Tensor) -> float:
    assert out is not None
    return float((out - truth).norm() / truth.norm())
