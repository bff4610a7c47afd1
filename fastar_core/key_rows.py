"""What a cache policy tells about the keys of a call, for attention that does not visit all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from .context import FwdCtx

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class KeyRows:
    """Keys of one call of one layer.

    ``parts``: (first row, rows, latent frame) in row order, without gaps; frame None = merged history of many frames.
    ``sink_end``: committed frames before this one are a pinned sink. ``owner``: what the keys belong to (one branch's policy or
    store): equal owner, layer and block mean equal history rows; ``part`` tells apart groups of heads that are kept separately.
    ``places``: for merged rows, latent frame * tokens per frame + cell of each row's newest token, int64 [B, G, rows].
    """

    layer: int
    ctx: FwdCtx
    owner: Hashable
    parts: tuple[tuple[int, int, int | None], ...]
    sink_end: int
    places: Callable[[], torch.Tensor] | None = None
    part: int = 0

    @property
    def key(self) -> tuple[Hashable, int, int]:
        """What a bucket order belongs to."""
        return self.owner, self.part, self.layer

    def spans(self, recent: int) -> tuple[Spans, Spans, Spans]:
        """Row spans (start, end) that are always visible, of history, and of the call's own frames; neighbours joined.

        The sink and the last ``recent`` frames before the call are always visible.
        """
        ctx = self.ctx
        kinds: tuple[list[tuple[int, int]], ...] = ([], [], [])
        for start, rows, frame in self.parts:
            if rows == 0:
                continue
            if frame is None:
                kind = 1
            elif ctx.start <= frame < ctx.end:
                kind = 2
            else:
                kind = 0 if frame < self.sink_end or frame >= ctx.start - recent else 1
            spans = kinds[kind]
            if spans and spans[-1][1] == start:
                spans[-1] = (spans[-1][0], start + rows)
            else:
                spans.append((start, start + rows))
        return tuple(kinds[0]), tuple(kinds[1]), tuple(kinds[2])


def frame_parts(frames: list[int], tokens: int, first_row: int = 0) -> tuple[tuple[int, int, int | None], ...]:
    """Parts of whole latent frames that follow each other from row ``first_row`` on."""
    return tuple((first_row + i * tokens, tokens, frame) for i, frame in enumerate(frames))


def span_rows(spans: Spans) -> int:
    """Rows in the spans."""
    return sum(end - start for start, end in spans)
