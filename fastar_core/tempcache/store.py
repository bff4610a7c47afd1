"""Keys and values of one layer as attention reads them: [sink | recent | history | own block] in one buffer of fixed size.

Keys in the buffer are rotated; the keys that can still move or be matched (sink, recent, history) are also kept before RoPE.
Values of the history stand twice: as float32 running means in the pool, as compute-type rows in the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..positions import rotate_rows
from .features import QueryMoment
from .pool import HistoryPool
from .settings import TempCacheSettings


@dataclass(frozen=True)
class StoreSizes:
    """Latent frames of each part (history in rows) and the token grid of a frame."""

    sink: int
    recent: int
    own: int
    history_rows: int
    rows: int
    cols: int

    @property
    def tokens(self) -> int:
        return self.rows * self.cols

    @property
    def pinned_frames(self) -> int:
        return self.sink + self.recent

    @property
    def buffer_rows(self) -> int:
        return (self.pinned_frames + self.own) * self.tokens + self.history_rows


class LayerStore:
    """One layer, or the part of its heads that share a capacity. Tensors are [B, H, rows, D]."""

    def __init__(self, sizes: StoreSizes, settings: TempCacheSettings, like: torch.Tensor) -> None:
        batch, heads, _, dim = like.shape
        self.sizes = sizes
        self.keys = like.new_empty((batch, heads, sizes.buffer_rows, dim))
        self.values = torch.empty_like(self.keys)
        self.raw = like.new_empty((batch, heads, sizes.pinned_frames * sizes.tokens, dim))
        groups = 1 if settings.shared else heads
        self.bias = torch.zeros((batch, groups, sizes.buffer_rows), dtype=torch.float32, device=like.device)
        self.mass = torch.zeros((batch, groups, sizes.buffer_rows), dtype=torch.float32, device=like.device)
        self.pool = HistoryPool(sizes.history_rows, sizes.rows, sizes.cols, settings, like) if sizes.history_rows else None
        self.moment = QueryMoment() if settings.similarity == "logit" else None
        self.bound = 0
        self.biased = False
        self.pending: tuple[torch.Tensor, int] | None = None
        self._undo: tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor, int, bool] | None = None

    def bytes(self) -> int:
        held = [self.keys, self.values, self.raw, self.bias, self.mass]
        if self._undo is not None:
            held += [t for t in self._undo if isinstance(t, torch.Tensor)]
        if self.pending is not None:
            held.append(self.pending[0])
        pool = 0 if self.pool is None else self.pool.bytes()
        moment = 0 if self.moment is None else self.moment.bytes()
        return sum(t.numel() * t.element_size() for t in held) + pool + moment

    def span(self, slot: int) -> slice:
        """Rows of a pinned slot (sink and recent)."""
        return slice(slot * self.sizes.tokens, (slot + 1) * self.sizes.tokens)

    # -- one call -----------------------------------------------------------------------------------------------------

    def write_own(self, keys: torch.Tensor, values: torch.Tensor, filled_slots: int) -> int:
        """Puts the call's rows (rotated keys) behind what is visible; returns the first of them."""
        start = filled_slots * self.sizes.tokens + self.bound
        stop = start + keys.shape[2]
        self.keys[:, :, start:stop] = keys
        self.values[:, :, start:stop] = values
        self.bias[:, :, start:stop] = 0
        return start

    def write_pinned(self, slot: int, raw: torch.Tensor, rotated: torch.Tensor, values: torch.Tensor) -> None:
        """One frame into a sink or recent slot."""
        span = self.span(slot)
        self.raw[:, :, span] = raw
        self.keys[:, :, span] = rotated
        self.values[:, :, span] = values

    def measure(self, q: torch.Tensor, stop: int, start: int, chosen: torch.Tensor) -> None:
        """Attention mass [B, G, rows] that the chosen queries give to every visible row; q [B, H, N, D] rotated."""
        some = q[:, :, chosen].float()
        bias = self.bias[:, :, None, start:stop]
        scores = some @ self.keys[:, :, start:stop].float().transpose(-1, -2) / q.shape[-1] ** 0.5 + bias
        mass = scores.softmax(-1).mean(2)
        self.mass.zero_()
        self.mass[:, :, start:stop] = mass.mean(1, keepdim=True) if self.mass.shape[1] == 1 else mass

    # -- commit -------------------------------------------------------------------------------------------------------

    def ingest(self, raw: torch.Tensor, values: torch.Tensor, frame: int, usage: torch.Tensor) -> None:
        """A frame leaves the recent range; without a history it is forgotten."""
        if self.pool is not None:
            self.pool.ingest(raw, values, frame, usage, self.moment)

    def refresh(self, filled_slots: int, position: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Writes the history into the buffer: rotated keys, means, log counts. ``position`` maps frame -> rotary position."""
        if self.pool is None:
            return
        start = filled_slots * self.sizes.tokens
        stop = start + self.sizes.history_rows
        pool = self.pool
        self.keys[:, :, start:stop] = rotate_rows(pool.k, position[pool.frame], pool.cell, tables)
        self.values[:, :, start:stop] = pool.v.to(self.values.dtype)
        self.bias[:, :, start:stop] = pool.count.float().log()  # log 0 = -inf hides free rows

    def occupancy(self) -> torch.Tensor:
        """int32 [3]: most and fewest occupied rows, highest multiplicity: what the host must know once per block."""
        assert self.pool is not None
        used = (self.pool.count > 0).sum(-1)
        return torch.stack([used.amax(), used.amin(), self.pool.count.amax()]).to(torch.int32)

    def begin_undo(self, slots: list[int]) -> None:
        """Keeps the pinned slots that the coming commit overwrites."""
        spans = [self.span(s) for s in slots]
        empty = self.raw[:, :, :0]
        rows = [torch.cat([t[:, :, s] for s in spans], 2) if spans else empty for t in (self.raw, self.keys, self.values)]
        self._undo = (slots, rows[0], rows[1], rows[2], self.bound, self.biased)
        if self.pool is not None:
            self.pool.begin_undo()

    def roll_back(self) -> None:
        assert self._undo is not None
        slots, raw, keys, values, self.bound, self.biased = self._undo
        for i, slot in enumerate(slots):
            span = self.span(i)
            self.write_pinned(slot, raw[:, :, span], keys[:, :, span], values[:, :, span])
        if self.pool is not None:
            self.pool.roll_back()
        self._undo = None
