"""Buckets of rows: k-means with warm start, and sign hash. Rows x are [B, H, N, D], codes int32 [B, H, N]."""

from __future__ import annotations

import torch

from ...kernels import registry

FIT_ROWS = 4096
COLD_STEPS, WARM_STEPS = 5, 1


def every(count: int, wanted: int, device: torch.device) -> torch.Tensor:
    """Up to ``wanted`` row numbers spread evenly over ``count`` rows."""
    return torch.linspace(0, count - 1, min(count, wanted), device=device).round().long()


def nearest_centroid(x: torch.Tensor, centroids: torch.Tensor, backend: str) -> torch.Tensor:
    """Code of the nearest centroid [B, H, K, D] of every row."""
    index, _ = registry.call("nearest", backend, x.to(centroids.dtype), centroids, None, "l2")
    return index.int()


def bucket_means(x: torch.Tensor, weight: torch.Tensor, codes: torch.Tensor, count: int,
                 backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean row (float32 [B, H, count, D]; 0 where empty) and sum of weights [B, H, count] of each bucket."""
    return registry.call("compact", backend, x, weight, codes, count, torch.float32)


def fit_centroids(x: torch.Tensor, weight: torch.Tensor, count: int, warm: torch.Tensor | None, backend: str) -> torch.Tensor:
    """``count`` centroids (float32) of rows x with weights float32 [B, H, N], by Lloyd's steps over a sample of the rows.

    ``warm``: centroids of before, kept when there are as many. A bucket that loses its last row keeps its centroid.
    """
    chosen = every(x.shape[2], FIT_ROWS, x.device)
    sample, share = x[:, :, chosen].float(), weight[:, :, chosen].contiguous()
    if warm is not None and warm.shape[2] == count and warm.shape[:2] == x.shape[:2]:
        centroids, steps = warm.to(x.device), WARM_STEPS
    else:
        centroids, steps = sample[:, :, every(sample.shape[2], count, x.device)], COLD_STEPS
    for _ in range(steps):
        means, total = bucket_means(sample, share, nearest_centroid(sample, centroids, backend), count, backend)
        centroids = torch.where(total[..., None] > 0, means, centroids)
    return centroids


def sign_planes(heads: int, dim: int, bits: int, seed: int, device: torch.device) -> torch.Tensor:
    """Seeded random planes [heads, dim, bits] from a generator of their own, the same on every device."""
    return torch.randn(heads, dim, bits, generator=torch.Generator().manual_seed(seed)).to(device)


def sign_codes(x: torch.Tensor, mean: torch.Tensor, planes: torch.Tensor, backend: str) -> torch.Tensor:
    """Sign hash of x around mean [B, H, D]."""
    return registry.call("hash_codes", backend, x.transpose(1, 2), mean, planes)
