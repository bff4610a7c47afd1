"""Rolling-Forcing's cache: a moving anchor, a working range, and windows that are never stored (backbones 3.3).

A denoise call sees [anchor | working | window]: the anchor (the pinned first frames) is rotated to sit just before the working
frames, everything else stands at its own frame number. A clean call stores its block and sees the last ``window`` frames up to
and with itself; the anchor belongs to them only while that range still reaches it. Without a limit the anchor formula gives
exactly frame 0, so the same rules serve the extended history.
"""

from __future__ import annotations

import torch

from ..context import FwdCtx
from ..errors import GeometryError
from ..key_rows import KeyRows, frame_parts
from .frame_cache import FrameCache, _Call


class RollingCache(FrameCache):
    """Frames of the anchor are stored before RoPE, all others at their absolute positions.

    ``window_frames`` of the settings limits the attended frames (None = the extended history).
    """

    _seen: list[int]
    _anchor_positions: list[int]

    @property
    def window(self) -> int | None:
        return self.settings.window_frames

    def visible_frames(self, start: int, num_frames: int) -> tuple[int, ...]:
        return (*self._seen_by_denoise(start, num_frames, range(start)), *range(start, start + num_frames))

    def _seen_by_denoise(self, start: int, num_frames: int, stored: range | list[int]) -> list[int]:
        anchor = [f for f in stored if f < min(self.sink, start)]
        working = [f for f in stored if self.sink <= f < start]
        if self.window is not None:
            room = max(0, self.window - num_frames - self.sink)
            working = working[len(working) - min(room, len(working)):]
        return anchor + working

    def _seen_by_clean(self, ctx: FwdCtx, stored: list[int]) -> list[int]:
        first = 0 if self.window is None else ctx.end - self.window
        return [f for f in stored if first <= f < ctx.start]

    def begin(self, ctx: FwdCtx) -> None:
        if ctx.phase == "denoise":
            if ctx.start > self.end:
                raise GeometryError(f"a window starts at latent frame {ctx.start}, but only {self.end} frames are committed")
            slots: list[int | None] = [None] * ctx.num_frames
        else:
            slots = self._store_slots(ctx)
        stored = sorted(f for f in self.frames if f is not None and f < min(ctx.start, self.end))
        if ctx.phase == "denoise":
            self._seen = self._seen_by_denoise(ctx.start, ctx.num_frames, stored)
        else:
            self._seen = self._seen_by_clean(ctx, stored)
        anchor = [f for f in self._seen if f < self.sink]
        offset = ctx.start - len(self._seen) if ctx.phase == "denoise" else 0
        self._anchor_positions = [offset + i for i in range(len(anchor))] if offset else anchor
        self._call = _Call(ctx, slots, list(range(ctx.start, ctx.end)), self._seen)

    def _store_slots(self, ctx: FwdCtx) -> list[int | None]:
        """A new block follows the committed frames; the last block may be committed again with better latents."""
        if ctx.phase == "prefill" and ctx.start == 0 and self.end > 0:
            self._restart()
        if ctx.start != self.end and ctx.end != self.end:
            raise GeometryError(f"a {ctx.phase} call over latent frames {ctx.start}..{ctx.end - 1} does not follow the {self.end} "
                                "committed frames")
        if not all(f in self.frames for f in range(ctx.start, ctx.end)):
            self._make_room(ctx)
        return [self.frames.index(f) for f in range(ctx.start, ctx.end)]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: FwdCtx) -> torch.Tensor:
        call = self._call
        if call is None or call.ctx != ctx:
            raise GeometryError(f"attend for frames {ctx.start}..{ctx.end - 1} without begin(); the model was called outside "
                                "the driver")
        rotated = self.rotary.rotate(k, call.query_positions)
        seen_k, seen_v = self._gather(layer)
        if ctx.commits:
            self._ensure_storage(layer, k, v)
            self._save_overwritten(layer)
            pinned = max(0, min(self.sink, ctx.end) - ctx.start) * self.tokens
            self._write(layer, call.slots, torch.cat([k[:, :pinned], rotated[:, pinned:]], 1), v)
        keys = torch.cat([*seen_k, rotated], 1)
        values = torch.cat([*seen_v, v], 1)
        rows = KeyRows(layer, ctx, self, frame_parts([*self._seen, *range(ctx.start, ctx.end)], self.tokens), self.sink)
        return self.attention.attend(self.rotary.rotate(q, call.query_positions), keys, values, rows=rows)

    def _gather(self, layer: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if not self._seen:
            return [], []
        spans = [self._span(self.frames.index(f)) for f in self._seen]
        keys = [self._keys[layer][:, s] for s in spans]
        values = [self._values[layer][:, s] for s in spans]
        count = len(self._anchor_positions)
        if count:
            keys = [self.rotary.rotate(torch.cat(keys[:count], 1), self._anchor_positions), *keys[count:]]
        return keys, values
