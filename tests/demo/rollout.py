"""A plain KV-cache sampler over wan_plain: blocks of three latent frames, four re-noised steps, a clean pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from demo.model import GRID, HEADS, SIGMAS
from demo.text import encode, pad_bias
from demo.world import BLOCK
from tiny import wan_plain

Pair = tuple[Tensor, Tensor]


class Cache:
    """Rotated keys and values of every layer, one entry per committed chunk of frames."""

    def __init__(self) -> None:
        self.chunks: list[tuple[int, int, list[Pair]]] = []  # first frame, frames, (k, v) per layer

    def visible(self, start: int, window: int | None, removed: bool) -> list[list[Pair]]:
        """Chunks a block at `start` attends to: all, those of the last `window` frames with its own, or the slate."""
        if removed:
            return [layers for first, _, layers in self.chunks if first == 0]
        oldest = 0 if window is None else start + BLOCK - window
        return [layers for first, _, layers in self.chunks if first >= oldest]


class Sampler:
    """Samples clips for a batch of prompts lists; the result depends on the seed alone."""

    def __init__(self, dit: Mapping[str, Tensor], text: Mapping[str, Tensor], slate: Tensor, dtype: torch.dtype) -> None:
        self.dit = {name: value.detach().to(dtype) for name, value in dit.items()}
        self.text = {name: value.detach().float() for name, value in text.items()}
        self.slate, self.dtype = slate, dtype

    def rows(self, ids: Tensor) -> Pair:
        """Text rows [B, L, 4096] and their attention bias [B, L] of ids [B, L]."""
        return encode(self.text, ids).to(self.dtype), pad_bias(ids).to(self.dtype)

    def call(self, x: Tensor, t: float, start: int, rows: Pair, seen: Sequence[list[Pair]]) -> tuple[Tensor, list[Pair]]:
        """Velocity of x [B, C, n, 16, 16] at frame `start`, and the chunk's own rotated (k, v) per layer."""
        positions = wan_plain.grid_positions(x.shape[2], GRID, GRID, start)
        own: list[Pair] = []

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = wan_plain.rope_rotate(q, positions), wan_plain.rope_rotate(k, positions)
            own.append((k, v))
            keys = torch.cat([chunk[layer][0] for chunk in seen] + [k], 1)
            values = torch.cat([chunk[layer][1] for chunk in seen] + [v], 1)
            return wan_plain.dense_attention(layer, q, keys, values)

        def cross(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, rows[1][:, None, None])
            return out.transpose(1, 2)

        times = torch.full((len(x), x.shape[2]), t)
        v = wan_plain.wan_forward(self.dit, x.to(self.dtype), times, rows[0], num_heads=HEADS, attend=attend, cross=cross)
        return v.float(), own

    def commit(self, cache: Cache, clean: Tensor, start: int, rows: Pair, window: int | None = None) -> None:
        """The clean pass: write the chunk's final keys and values."""
        own = self.call(clean, 0.0, start, rows, cache.visible(start, window, False))[1]
        cache.chunks.append((start, clean.shape[2], own))

    def block(
        self,
        cache: Cache,
        start: int,
        rows: Pair,
        draw: Callable[[], Tensor],
        window: int | None = None,
        removed: bool = False,
    ) -> Tensor:
        """Denoise one block [B, C, 3, 16, 16]; the cache stays as it is."""
        seen = cache.visible(start, window, removed)
        x = draw()
        for step, sigma in enumerate(SIGMAS):
            v, _ = self.call(x, 1000 * sigma, start, rows, seen)
            clean = x - sigma * v
            if step + 1 < len(SIGMAS):
                after = SIGMAS[step + 1]
                x = (1 - after) * clean + after * draw()
        return clean

    @torch.no_grad()
    def run(
        self,
        ids: Sequence[Tensor],
        seed: int,
        first: Tensor | None = None,
        window: int | None = None,
        bare: dict[int, Tensor] | None = None,
        truth: Tensor | None = None,
    ) -> Tensor:
        """ids: per block [B, L]; first: start latents [B, C, 16, 16], default the slate -> [B, C, 1+3n, 16, 16].

        bare: block numbers to be sampled a second time with nothing but the start latent in view, filled with the
        results. truth: latents as the result; they are committed in place of what was sampled.
        """
        count = len(ids[0])
        g = torch.Generator().manual_seed(seed)

        def draw() -> Tensor:
            return torch.randn(count, 16, BLOCK, 2 * GRID, 2 * GRID, generator=g)

        start = self.slate.expand(count, -1, -1, -1) if first is None else first
        out, cache = [start.unsqueeze(2)], Cache()
        self.commit(cache, out[0], 0, self.rows(ids[0]))
        for number, words in enumerate(ids):
            rows, at = self.rows(words), 1 + BLOCK * number
            if bare is not None and number in bare:
                bare[number] = self.block(cache, at, rows, draw, removed=True)
            out.append(self.block(cache, at, rows, draw, window))
            clean = out[-1] if truth is None else truth[:, :, at : at + BLOCK]
            self.commit(cache, clean, at, rows, window)
        return torch.cat(out, 2)
