"""`full` and `sink_window`: whole latent frames in a fixed number of slots per layer.

Softmax does not care about the order of keys, so a new block simply takes the slots of the frames it evicts: nothing moves, and
the visible keys are always one contiguous range. Invariants: slots < sink frames are never evicted; the visible set equals
visible_frames(); until the next block begins, rollback can restore what the last block overwrote. A call that is abandoned for one
of another length is rolled back first, so nothing of it stays visible.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..attention import Attention
from ..context import FwdCtx
from ..errors import GeometryError
from ..geometry import RunGeometry
from ..key_rows import KeyRows, frame_parts
from ..positions import RopeSpec, Rotary
from .base import CachePolicy, PolicySettings


@dataclass
class _Undo:
    """What a block overwrote: its slots with their former frames, and (per layer) the former rows."""

    start: int
    slots: list[int]
    frames: list[int | None]
    rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass
class _Call:
    """Plan of the current call: ``slots[i]`` receives frame ``frames[i]`` of the call (None = computed, not stored)."""

    ctx: FwdCtx
    slots: list[int | None]
    query_positions: list[int]
    key_positions: list[int]


class FrameCache(CachePolicy):
    """Slot cache of ``capacity`` latent frames of which the first ``sink`` are pinned."""

    def __init__(self, capacity: int, sink: int, settings: PolicySettings, geometry: RunGeometry, rope: RopeSpec,
                 attention: Attention) -> None:
        self.capacity = capacity
        self.sink = min(sink, capacity)
        self.settings = settings
        self.tokens = geometry.tokens_per_frame
        self.attention = attention
        self.rotary = Rotary(rope, geometry.rows, geometry.cols)
        self.absolute = settings.positions == "absolute"
        self.reset()

    def reset(self) -> None:
        self.frames: list[int | None] = [None] * self.capacity
        self.first = 0
        self.end = 0
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}
        self._undo: _Undo | None = None
        self._call: _Call | None = None

    def bytes(self) -> int:
        held = [*self._keys.values(), *self._values.values()]
        if self._undo is not None:
            held += [t for pair in self._undo.rows.values() for t in pair]
        return sum(t.numel() * t.element_size() for t in held) + self.rotary.bytes()

    def visible_frames(self, start: int, num_frames: int) -> tuple[int, ...]:
        room = self.capacity - num_frames
        if start - self.first <= room:
            return tuple(range(self.first, start + num_frames))
        sink_end = self.first + self.sink
        recent = range(max(sink_end, start - (room - self.sink)), start)
        return (*range(self.first, min(sink_end, start)), *recent, *range(start, start + num_frames))

    def committed_frames(self) -> tuple[int, ...]:
        """Latent frames whose clean keys and values are stored, ascending."""
        return tuple(sorted(f for f in self.frames if f is not None and f < self.end))

    def _restart(self) -> None:
        """A prefill of frame 0 begins a new timeline in the same memory."""
        self.frames = [None] * self.capacity
        self.first = 0
        self.end = 0
        self._undo = None

    # -- planning -----------------------------------------------------------------------------------------------------

    def begin(self, ctx: FwdCtx) -> None:
        if ctx.phase == "recache":
            slots = self._recache_slots(ctx)
        else:
            if ctx.phase == "prefill" and ctx.start == 0 and self.end > 0:
                self._restart()
            if ctx.start != self.end:
                raise GeometryError(f"a {ctx.phase} call starts at latent frame {ctx.start}, but {self.end} frames are "
                                    "committed; blocks must follow each other and be committed by a clean pass")
            wanted = list(range(ctx.start, ctx.end))
            pending = sorted(f for f in self.frames if f is not None and f >= self.end)
            if pending != wanted:
                if pending:
                    self.rollback(self.end)
                self._make_room(ctx)
            slots = [self.frames.index(f) for f in wanted]
        self._call = self._plan(ctx, slots)

    def _plan(self, ctx: FwdCtx, slots: list[int | None]) -> _Call:
        stored = [f for f in self.frames if f is not None]
        if self.absolute:
            return _Call(ctx, slots, list(range(ctx.start, ctx.end)), stored)
        ranks = {f: i for i, f in enumerate(sorted(stored))}
        last = max(len(stored), ctx.num_frames)
        queries = list(range(last - ctx.num_frames, last))
        return _Call(ctx, slots, queries, [ranks[f] for f in stored])

    def _recache_slots(self, ctx: FwdCtx) -> list[int | None]:
        """Frames still stored are rewritten in place; others are computed but not stored ("keep"), or the store starts anew."""
        self._undo = None
        if ctx.end != self.end:
            raise GeometryError(f"a recache must end at the last committed latent frame {self.end}, not {ctx.end}")
        recached = range(ctx.start, ctx.end)
        if self.settings.recache == "drop":
            if len(recached) > self.capacity:
                raise GeometryError(f"a recache of {len(recached)} latent frames does not fit in a window of {self.capacity}; "
                                    "recache fewer frames or raise window_frames")
            self.first = ctx.start
            self.frames = [*recached, *[None] * (self.capacity - len(recached))]
        return [self.frames.index(f) if f in self.frames else None for f in recached]

    def _make_room(self, ctx: FwdCtx) -> None:
        """Gives the frames of a new block their slots: free ones first, then those of the oldest frames after the sink."""
        if ctx.num_frames > self.capacity - self.sink and ctx.start >= self.sink:
            raise GeometryError(f"a call of {ctx.num_frames} latent frames does not fit beside a sink of {self.sink} in a "
                                f"window of {self.capacity}; raise window_frames or lower the block size")
        free = [s for s, f in enumerate(self.frames) if f is None]
        evictable = sorted((f, s) for s, f in enumerate(self.frames) if f is not None and s >= self.sink)
        slots = (free + [s for _, s in evictable])[: ctx.num_frames]
        if len(slots) < ctx.num_frames:
            raise GeometryError(f"{ctx.num_frames} latent frames do not fit in a window of {self.capacity}")
        self._undo = _Undo(ctx.start, slots, [self.frames[s] for s in slots])
        for slot, frame in zip(slots, range(ctx.start, ctx.end)):
            self.frames[slot] = frame

    # -- one layer ----------------------------------------------------------------------------------------------------

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: FwdCtx) -> torch.Tensor:
        call = self._call
        if call is None or call.ctx != ctx:
            raise GeometryError(f"attend for frames {ctx.start}..{ctx.end - 1} without begin(); the model was called outside "
                                "the driver")
        self._ensure_storage(layer, k, v)
        keys = self.rotary.rotate(k, call.query_positions) if self.absolute else k
        self._save_overwritten(layer)
        self._write(layer, call.slots, keys, v)
        filled = sum(f is not None for f in self.frames) * self.tokens
        seen_k, seen_v = self._keys[layer][:, :filled], self._values[layer][:, :filled]
        if not self.absolute:
            seen_k = self.rotary.rotate(seen_k, call.key_positions)
        shown = [f for f in self.frames if f is not None]
        rows = KeyRows(layer, ctx, self, frame_parts(shown, self.tokens), self.first + self.sink)
        return self.attention.attend(self.rotary.rotate(q, call.query_positions), seen_k, seen_v, rows=rows)

    def adopt(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Takes k and v [B, capacity * S, heads, head_dim] (rotated, where positions are absolute) as the rows of all slots."""
        self._keys[layer], self._values[layer] = k, v

    def _ensure_storage(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        for store, like in ((self._keys, k), (self._values, v)):
            held = store.get(layer)
            if held is None:
                shape = (like.shape[0], self.capacity * self.tokens, *like.shape[2:])
                store[layer] = torch.empty(shape, dtype=like.dtype, device=like.device)
            elif held.device != like.device or held.dtype != like.dtype:
                store[layer] = held.to(device=like.device, dtype=like.dtype)

    def _span(self, slot: int) -> slice:
        return slice(slot * self.tokens, (slot + 1) * self.tokens)

    def _write(self, layer: int, slots: list[int | None], k: torch.Tensor, v: torch.Tensor) -> None:
        for i, slot in enumerate(slots):
            if slot is not None:
                self._keys[layer][:, self._span(slot)] = k[:, self._span(i)]
                self._values[layer][:, self._span(slot)] = v[:, self._span(i)]

    def _save_overwritten(self, layer: int) -> None:
        undo = self._undo
        if undo is None or layer in undo.rows or all(f is None for f in undo.frames):
            return
        spans = [self._span(s) for s in undo.slots]
        undo.rows[layer] = (torch.cat([self._keys[layer][:, s] for s in spans], 1),
                            torch.cat([self._values[layer][:, s] for s in spans], 1))

    # -- commit and rollback ------------------------------------------------------------------------------------------

    def commit(self, ctx: FwdCtx) -> None:
        if ctx.phase in ("clean", "prefill"):
            self.end = ctx.end
        self._call = None

    def rollback(self, start: int) -> None:
        undo = self._undo
        if undo is None or undo.start != start:
            kept = "nothing" if undo is None else f"the block at latent frame {undo.start}"
            raise GeometryError(f"cannot roll back to latent frame {start}: the cache can undo {kept}; deeper steps replay "
                                "clean passes from the run's latents")
        for layer, (k, v) in undo.rows.items():
            self._write(layer, list(undo.slots), k, v)
        for slot, frame in zip(undo.slots, undo.frames):
            self.frames[slot] = frame
        self.end = start
        self._undo = None
        self._call = None
