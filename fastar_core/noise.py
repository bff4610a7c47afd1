"""Every random draw of a run, from CPU generators keyed by (seed, block, step); the global generator is untouched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .errors import GeometryError

BLOCK_SEED_STRIDE = 1000
SEED_LIMIT = 2**64


class RenoiseSource(Protocol):
    """Where the fresh noise between two denoise steps comes from."""

    def __call__(self, block: int, step: int, like: torch.Tensor) -> torch.Tensor:
        """Standard normal noise of ``like``'s shape, dtype and device, drawn after ``step`` of generated ``block``."""
        ...


def seeded_normal(seed: int, shape: Sequence[int]) -> torch.Tensor:
    """Standard normal float32 draw on the CPU from a generator of its own."""
    generator = torch.Generator(device="cpu").manual_seed(seed % SEED_LIMIT)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32)


class SeededRenoise:
    """The stock AR sampler's rule: the draw after step i of block b is seeded with seed + 1000 b + i."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, block: int, step: int, like: torch.Tensor) -> torch.Tensor:
        draw = seeded_normal(self.seed + BLOCK_SEED_STRIDE * block + step, like.shape)
        return draw.to(device=like.device, dtype=like.dtype)


class RecordedRenoise:
    """Replays recorded draws in the order of use; raises GeometryError when a draw does not fit."""

    def __init__(self, draws: Sequence[torch.Tensor]) -> None:
        self.draws = list(draws)
        self.used = 0

    def __call__(self, block: int, step: int, like: torch.Tensor) -> torch.Tensor:
        if self.used >= len(self.draws) or self.draws[self.used].shape != like.shape:
            raise GeometryError(f"no recorded draw number {self.used} of shape {tuple(like.shape)}; "
                                f"{len(self.draws)} were recorded")
        self.used += 1
        return self.draws[self.used - 1].to(device=like.device, dtype=like.dtype)
