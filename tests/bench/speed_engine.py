"""Times one block (denoise steps, clean pass, all work of the policy) of a random-weight Wan at any cache length.

The cache is filled directly with random rows instead of running the rollout up to there; what is timed is the real model call.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.geometry import RunGeometry
from fastar_pack.fastar_core.policies import PolicySettings, make_policy
from fastar_pack.fastar_core.policies.frame_cache import FrameCache
from fastar_pack.fastar_core.positions import RopeSpec
from fastar_pack.fastar_core.runstate import RunState
from fastar_pack.fastar_core.tempcache.policy import TempCache
from tiny.wan_plain import wan_forward

SIGMAS = (1.0, 0.9375, 5 / 6, 0.625)


@dataclass(frozen=True)
class Shape:
    """Sizes of the timed model: 16 x 16 tokens per latent frame unless said otherwise."""

    rows: int = 16
    cols: int = 16
    heads: int = 2
    head_dim: int = 128
    layers: int = 2
    ffn: int = 1024
    block: int = 3

    @property
    def tokens(self) -> int:
        return self.rows * self.cols


class SpeedEngine:
    """One policy at one cache length. ``block_seconds`` runs a block at ``start`` and leaves the cache as it found it."""

    def __init__(self, shape: Shape, settings: PolicySettings, start: int, weights: dict[str, torch.Tensor],
                 real: bool = False) -> None:
        self.shape, self.start, self.weights = shape, start, weights
        total = start + shape.block
        geometry = RunGeometry(total, shape.block, shape.rows, shape.cols, shape.layers)
        self.run = RunState(settings, geometry, RopeSpec(shape.head_dim))
        self.generator = torch.Generator().manual_seed(start)
        self.text = torch.randn(1, 16, weights["text_embedding.0.weight"].shape[1], generator=self.generator)
        if real:
            self._commit_all()
        else:
            self._fill()

    def _random(self, frames: int) -> torch.Tensor:
        s = self.shape
        return torch.randn(1, frames * s.tokens, s.heads, s.head_dim, generator=self.generator)

    def _context(self, phase: str, start: int, count: int, sigma: float, step: int = 0) -> FwdCtx:
        return FwdCtx(phase, start, count, (sigma,) * count, (1000 * sigma,) * count, self.shape.rows, self.shape.cols, step)  # type: ignore[arg-type]

    def _fill(self) -> None:
        """Fills the cache to its budget: slots of the frame cache directly, TempCache by real commits of its last frames."""
        policy = make_policy(self.run.settings, self.run.geometry, self.run.rope, self.run.attention)
        self.policy = self.run.adopt("positive", policy)
        if isinstance(policy, FrameCache):
            seen = [f for f in policy.visible_frames(self.start, self.shape.block) if f < self.start]
            policy.frames = [*seen, *[None] * (policy.capacity - len(seen))]
            policy.end = self.start
            for layer in range(self.shape.layers):
                policy.adopt(layer, self._random(policy.capacity), self._random(policy.capacity))
            return
        assert isinstance(policy, TempCache)
        block, sizes = self.shape.block, policy.sizes
        frames = sizes.sink + sizes.recent + -(-sizes.history_rows // self.shape.tokens) + block
        frames = min(self.start, -(-frames // block) * block)
        policy.ledger.restart(self.start - frames)
        for at in range(self.start - frames, self.start, block):
            ctx = self._context("clean", at, block, 0.0)
            policy.begin(ctx)
            for layer in range(self.shape.layers):
                policy.attend(layer, self._random(block), self._random(block), self._random(block), ctx)
            policy.commit(ctx)

    def _commit_all(self) -> None:
        """Fills the cache by clean passes over random latents, as a rollout does; the same for every policy."""
        self.policy = self.run.adopt("positive", make_policy(self.run.settings, self.run.geometry, self.run.rope, self.run.attention))
        for at in range(0, self.start, self.shape.block):
            self._call(self._context("clean", at, self.shape.block, 0.0), self._latent())

    def _latent(self) -> torch.Tensor:
        return torch.randn(1, 16, self.shape.block, 2 * self.shape.rows, 2 * self.shape.cols, generator=self.generator)

    def first_output(self) -> torch.Tensor:
        """Velocity of the first denoise call of the block at ``start``."""
        return self._call(self._context("denoise", self.start, self.shape.block, SIGMAS[0]), self._latent())

    @torch.inference_mode()  # as the host samples
    def _call(self, ctx: FwdCtx, x: torch.Tensor) -> torch.Tensor:
        self.run.begin(ctx)
        policy = self.run.policy("positive")
        out = wan_forward(self.weights, x, torch.tensor([ctx.timesteps]), self.text, num_heads=self.shape.heads,
                          attend=lambda layer, q, k, v: policy.attend(layer, q, k, v, ctx))
        self.run.end()
        return out

    def block_seconds(self) -> float:
        """Seconds of all model calls of one block and everything the policy does for it."""
        shape, x = self.shape, self._latent()
        begun = time.perf_counter()
        for step, sigma in enumerate(SIGMAS):
            self._call(self._context("denoise", self.start, shape.block, sigma, step), x)
        self._call(self._context("clean", self.start, shape.block, 0.0), x)
        seconds = time.perf_counter() - begun
        self.policy.rollback(self.start)
        return seconds

    def visible_rows(self) -> int:
        """Key rows one query sees in a denoise call."""
        policy = self.policy
        tokens = self.shape.tokens
        if isinstance(policy, TempCache):
            return (len(policy.ledger.frames) + self.shape.block) * tokens + policy.stores(0)[0].bound
        return len(policy.visible_frames(self.start, self.shape.block)) * tokens
