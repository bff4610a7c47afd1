"""Rolling-Forcing written down a second time, in the plainest form: lists of frames, keys kept before RoPE, no policy, no driver.

Every rule is a method, so that a test can swap one for a wrong one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastar_pack.fastar_core.noise import SeededRenoise
from tiny.wan_plain import dense_attention, grid_positions, rope_rotate, wan_forward

Places = list[tuple[int, int]]  # (frame, position)


@dataclass
class RollingOracle:
    """``limit``: frames attended at most (None = no limit); ``stored``: frames kept (sink and the newest); sigmas = the levels."""

    weights: dict[str, Tensor]
    heads: int
    text: Tensor
    noise: Tensor
    sigmas: Sequence[float]
    seed: int
    block: int = 3
    limit: int | None = 21
    sink: int = 3
    prefix: Tensor | None = None
    store: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)
    calls: list[tuple[str, int, int]] = field(default_factory=list)

    # -- the rules ----------------------------------------------------------------------------------------------------

    def level(self, window: int, block: int) -> int:
        return window - block

    def working(self, start: int, count: int) -> list[int]:
        frames = list(range(self.sink, start))
        if self.limit is None:
            return frames
        room = max(0, self.limit - count - self.sink)
        return frames[max(0, len(frames) - room):]

    def anchor_position(self, start: int, working: int) -> int:
        return start - working - min(self.sink, start)

    def denoise_keys(self, start: int, count: int) -> Places:
        working = self.working(start, count)
        first = self.anchor_position(start, len(working))
        anchor = [(frame, first + frame) for frame in range(min(self.sink, start))]
        return anchor + [(frame, frame) for frame in working]

    def clean_keys(self, start: int, count: int) -> Places:
        first = 0 if self.limit is None else max(0, start + count - self.limit)
        return [(frame, frame) for frame in range(first, start)]

    def clean_time(self) -> float:
        return 0.0

    # -- the model ----------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, start: int, timesteps: Sequence[float], keys: Places, keep: bool) -> Tensor:
        rows, cols = -(-x.shape[3] // 2), -(-x.shape[4] // 2)
        count = x.shape[2]

        def placed(rows_of: Tensor, frame: int) -> Tensor:
            return rope_rotate(rows_of, grid_positions(1, rows, cols, frame))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            own = list(zip(range(start, start + count), q.chunk(count, 1), k.chunk(count, 1), v.chunk(count, 1)))
            seen = [placed(self.store[layer, frame][0], position) for frame, position in keys]
            seen += [placed(key, frame) for frame, _, key, _ in own]
            values = [self.store[layer, frame][1] for frame, _ in keys] + [value for *_, value in own]
            if keep:
                self.store.update({(layer, frame): (key, value) for frame, _, key, value in own})
            query = torch.cat([placed(one, frame) for frame, one, _, _ in own], 1)
            return dense_attention(layer, query, torch.cat(seen, 1), torch.cat(values, 1))

        t = torch.tensor(timesteps)[None].expand(x.shape[0], -1)
        return wan_forward(self.weights, x, t, self.text, num_heads=self.heads, attend=attend)

    def clean(self, x0: Tensor, start: int) -> None:
        count = x0.shape[2]
        self.calls.append(("clean", start, count))
        self.forward(x0, start, [self.clean_time()] * count, self.clean_keys(start, count), keep=True)

    # -- the sampler --------------------------------------------------------------------------------------------------

    def spans(self) -> list[tuple[int, int]]:
        """(start, count) of the generated blocks."""
        begin = 0 if self.prefix is None else self.prefix.shape[2]
        total = self.noise.shape[2]
        return [(s, min(self.block, total - s)) for s in range(begin, total, self.block)]

    def run(self) -> Tensor:
        out, state, draw = self.noise.clone(), torch.zeros_like(self.noise), SeededRenoise(self.seed)
        if self.prefix is not None:
            out[:, :, :self.prefix.shape[2]] = self.prefix
            for s in range(0, self.prefix.shape[2], self.block):
                self.clean(self.prefix[:, :, s:s + self.block], s)
        spans, levels = self.spans(), len(self.sigmas)
        for window in range(len(spans) + levels - 1):
            members = range(max(0, window - levels + 1), min(len(spans) - 1, window) + 1)
            if window < len(spans):
                s, n = spans[window]
                state[:, :, s:s + n] = self.noise[:, :, s:s + n]
            start, end = spans[members[0]][0], sum(spans[members[-1]])
            sigma = torch.tensor([self.sigmas[self.level(window, b)] for b in members for _ in range(spans[b][1])])
            self.calls.append(("denoise", start, end - start))
            v = self.forward(state[:, :, start:end], start, (1000 * sigma).tolist(), self.denoise_keys(start, end - start), keep=False)
            x0 = state[:, :, start:end] - sigma[None, None, :, None, None] * v
            out[:, :, start:end] = x0
            for b in members:
                s, n = spans[b]
                level = self.level(window, b)
                if level + 1 < levels:
                    part = out[:, :, s:s + n]
                    following = self.sigmas[level + 1]
                    state[:, :, s:s + n] = (1 - following) * part + following * draw(b, level, part)
            s, n = spans[members[0]]
            self.clean(out[:, :, s:s + n], s)
        return out
