"""Keys and values of one layer as attention reads them: [sink | recent | history | own block] in one buffer of fixed size.

"Home" keys are those that are compared and averaged: rotated to their true positions (space "post") or not rotated ("pre").
The buffer holds keys as the next call needs them. Where both are the same, the history lives in the buffer itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..positions import rotate_rows
from .features import QueryMoment
from .ledger import Move
from .pool import HistoryPool, Ingested
from .rows import MeanRows, PackedRows
from .settings import TempCacheSettings
from .sizes import StoreSizes
from .step_recall import StepRecall

Tables = tuple[torch.Tensor, torch.Tensor]
IngestWatch = Callable[[int, Ingested], None]


@dataclass(frozen=True)
class Pending:
    """What a committing call leaves for its commit, beside its own rows in the buffer: home keys where they differ from what
    the buffer holds, the queries that measure, the queries' new second moment."""

    own: slice
    home: torch.Tensor | None
    queries: torch.Tensor | None
    moment: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.home, self.queries, self.moment) if t is not None]


@dataclass(frozen=True)
class _Undo:
    """Pinned slots that a commit overwrites with their rows, and what else a roll-back restores."""

    slots: list[int]
    rows: list[torch.Tensor]
    bound: int
    biased: bool
    moment: torch.Tensor | None


class LayerStore:
    """One layer, or the part of its heads that share a capacity. Tensors are [B, H, rows, D]."""

    def __init__(self, sizes: StoreSizes, settings: TempCacheSettings, like: torch.Tensor) -> None:
        batch, heads, _, dim = like.shape
        self.sizes, self.settings = sizes, settings
        self.packed = settings.history_type == "int8" and sizes.history_rows > 0
        self.moves = settings.space == "pre" or settings.reindex_span is not None
        in_buffer = 0 if self.packed else sizes.history_rows
        rows = sizes.pinned_rows + in_buffer + sizes.own * sizes.tokens
        self.keys = like.new_zeros((batch, heads, rows, dim))
        self.values = torch.zeros_like(self.keys)
        self.home = like.new_empty((batch, heads, sizes.pinned_rows, dim)) if self.moves else self.keys[:, :, :sizes.pinned_rows]
        groups = 1 if settings.shared else heads
        self.bias = torch.zeros((batch, groups, sizes.history_rows), dtype=torch.float32, device=like.device)
        self.pool = self._make_pool(like) if sizes.history_rows else None
        self.moment = QueryMoment() if settings.similarity == "logit" else None
        self.bound = 0
        self.biased = False
        self.pending: Pending | None = None
        self.recall: torch.Tensor | None = None
        self.tally = torch.zeros(4, dtype=torch.int64, device=like.device)
        self.watch: IngestWatch | None = None
        self._undo: _Undo | None = None

    def _make_pool(self, like: torch.Tensor) -> HistoryPool:
        sizes = self.sizes
        shape = (*like.shape[:2], sizes.history_rows, like.shape[3])
        history = slice(sizes.pinned_rows, sizes.pinned_rows + sizes.history_rows)
        blank = like.new_zeros(()).expand(shape) if self.packed else self.keys[:, :, history]
        if self.packed:
            keys: MeanRows | PackedRows = PackedRows(blank)
            values: MeanRows | PackedRows = PackedRows(blank)
        else:
            keys = MeanRows(like.new_zeros(shape) if self.moves else blank, self.settings.representative == "mean")
            values = MeanRows(self.values[:, :, history])
        return HistoryPool(keys, values, blank, sizes.rows, sizes.cols, self.settings)

    def bytes(self) -> int:
        """Bytes of every tensor held right now; views into the buffer count once."""
        held = [self.keys, self.values, self.home, self.bias]
        if self._undo is not None:
            held += [*self._undo.rows, *([] if self._undo.moment is None else [self._undo.moment])]
        held += [] if self.pending is None else self.pending.tensors()
        held += [] if self.moment is None else self.moment.tensors()
        held += [] if self.pool is None else self.pool.held()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
        return sum(storages.values())

    def _frame(self, number: int) -> slice:
        """Rows of a pinned slot, or of a frame of the call."""
        return slice(number * self.sizes.tokens, (number + 1) * self.sizes.tokens)

    # -- one call -----------------------------------------------------------------------------------------------------

    def write_own(self, keys: torch.Tensor, values: torch.Tensor, filled_slots: int) -> slice:
        """Puts the call's rows (keys as the call rotates them) behind what is visible."""
        start = filled_slots * self.sizes.tokens
        if self.bound and not self.packed:
            start = self.sizes.pinned_rows + self.bound
        own = slice(start, start + keys.shape[2])
        self.keys[:, :, own] = keys
        self.values[:, :, own] = values
        return own

    def write_pinned(self, slot: int, home: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """One frame into a sink or recent slot."""
        span = self._frame(slot)
        self.keys[:, :, span] = keys
        self.values[:, :, span] = values
        if self.moves:
            self.home[:, :, span] = home

    def visible(self, filled_slots: int, own: slice | None,
                tables: Tables | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Keys, values [B, H, n, D] and bias [B, G, n] (None = all zero) in the order pinned, history, own."""
        pinned = filled_slots * self.sizes.tokens
        count = 0 if own is None else own.stop - own.start
        if self.packed:
            keys, values = self._unpacked(pinned, own, tables)
        elif self.bound and pinned < self.sizes.pinned_rows:  # after a restart, slots before the history are still empty
            after = slice(self.sizes.pinned_rows, self.sizes.pinned_rows + self.bound + count)
            keys, values = (torch.cat([t[:, :, :pinned], t[:, :, after]], 2) for t in (self.keys, self.values))
        else:
            keys, values = (t[:, :, :pinned + self.bound + count] for t in (self.keys, self.values))
        if not self.biased:
            return keys, values, None
        edges = [self.bias.new_zeros((*self.bias.shape[:2], n)) for n in (pinned, count)]
        return keys, values, torch.cat([edges[0], self.bias[:, :, :self.bound], edges[1]], -1)

    def _unpacked(self, pinned: int, own: slice | None, tables: Tables | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.pool is not None
        dtype = self.keys.dtype
        last = own or slice(pinned, pinned)
        history = self.pool.occupied(self.pool.keys)[:, :, :self.bound]
        if tables is not None:
            history = rotate_rows(history, self.pool.frame[:, :, :self.bound], self.pool.cell[:, :, :self.bound], tables)
        values = self.pool.occupied(self.pool.values)[:, :, :self.bound].to(dtype)
        return (torch.cat([self.keys[:, :, :pinned], history.to(dtype), self.keys[:, :, last]], 2),
                torch.cat([self.values[:, :, :pinned], values, self.values[:, :, last]], 2))

    # -- commit -------------------------------------------------------------------------------------------------------

    def hold(self, own: slice, home_q: torch.Tensor, home_k: torch.Tensor, queries: torch.Tensor | None) -> None:
        """Keeps for the commit what cannot be read from the buffer then; ``queries`` [B, H, Q, D] measure use and recall."""
        moment = None if self.moment is None else self.moment.observe(home_q)
        self.pending = Pending(own, home_k.clone() if self.moves else None, queries, moment)

    def commit(self, move: Move, start: int, tables: Tables | None) -> None:
        """Takes the leaving frames into the history and the own rows of the call (from frame ``start``) into their slots.

        ``tables``: those of the call.
        """
        assert self.pending is not None
        pending, self.pending = self.pending, None
        pinned = len(move.before) * self.sizes.tokens
        measured = None
        if self.pool is not None and pending.queries is not None:
            keys, _, bias = self.visible(len(move.before), pending.own, tables)
            measured = StepRecall(pending.queries, keys, bias, pinned, self.bound, self.pool)
        keys, values = (t[:, :, pending.own] for t in (self.keys, self.values))
        if self.packed or self.bound < self.sizes.history_rows or len(move.after) > len(move.before):
            keys, values = keys.clone(), values.clone()  # what the commit writes may reach these rows
        home = keys if pending.home is None else pending.home
        self._begin_undo([slot for slot in move.changed if slot < len(move.before)])
        if pending.moment is not None and self.moment is not None:
            self.moment.take(pending.moment)
        if measured is not None:
            self._take_in(move, start, home, values, measured)
        for slot in move.changed:
            span = self._frame(move.after[slot] - start)
            self.write_pinned(slot, home[:, :, span], keys[:, :, span], values[:, :, span])
        if measured is not None:
            self.recall = measured.finish(lambda slot: self._turned(slot, tables), self._kept_rows(move, start, measured.own_start))

    def _take_in(self, move: Move, start: int, home: torch.Tensor, values: torch.Tensor, measured: StepRecall) -> None:
        """The leaving frames join the history: those of the call itself, or pinned ones that make room."""
        pool = self.pool
        assert pool is not None
        pool.use(measured.history_mass())
        leaving = []
        for frame in move.leaving:
            mine = frame >= start
            span = self._frame(frame - start if mine else move.before.index(frame))
            source, source_v = (home, values) if mine else (self.home, self.values)
            leaving.append((frame, mine, span, source[:, :, span], source_v[:, :, span]))
        index = pool.open_index(self.moment, [keys for *_, keys, _ in leaving]) if leaving else None
        for number, (frame, mine, span, k, v) in enumerate(leaving):
            went = pool.ingest(k, v, frame, measured.mass_of(span, mine), self.moment, index, number)
            measured.follow(span, mine, went)
            self.tally += went.counts()
            if self.watch is not None:
                self.watch(frame, went)

    def absorb(self, pinned: list[tuple[int, int]]) -> None:
        """Pinned (frame, slot) pairs, oldest first, join the history; they count as used as its average row."""
        pool = self.pool
        self._undo = None  # a new timeline takes nothing back of the old one
        if pool is None:
            return
        pool.undo = None
        for frame, slot in pinned:
            span = self._frame(slot)
            usage = pool.usage.mean(-1, keepdim=True).expand(-1, -1, self.sizes.tokens)
            went = pool.ingest(self.home[:, :, span], self.values[:, :, span], frame, usage, self.moment)
            self.tally += went.counts()
            if self.watch is not None:
                self.watch(frame, went)

    def _turned(self, slot: torch.Tensor, tables: Tables | None) -> torch.Tensor:
        """Keys [B, H, N, D] of history rows ``slot`` [B, G, N] after the commit, still turned for the call that was committed."""
        pool = self.pool
        assert pool is not None
        keys = pool.keys.pick(slot).masked_fill((torch.gather(pool.count, 2, slot) == 0)[..., None], 0)
        if tables is not None:
            keys = rotate_rows(keys, torch.gather(pool.frame, 2, slot), torch.gather(pool.cell, 2, slot), tables)
        return keys.to(self.keys.dtype)

    def _kept_rows(self, move: Move, start: int, own_start: int) -> torch.Tensor:
        """Where each pinned row stood in the measured pass of the call from frame ``start``."""
        tokens = self.sizes.tokens
        new = {move.after[slot] for slot in move.changed}
        at = [own_start + (f - start) * tokens if f in new else move.before.index(f) * tokens for f in move.after]
        places = [torch.arange(a, a + tokens) for a in at]
        return torch.cat([torch.zeros(0, dtype=torch.int64), *places]).to(self.keys.device)

    def refresh(self, tables: Tables | None, slots_frames: list[int]) -> None:
        """Brings the buffer up to date for the next call: log counts, and rotated copies where home keys are not what it reads."""
        rows = slice(self.sizes.pinned_rows, self.sizes.pinned_rows + self.sizes.history_rows)
        if self.pool is not None:
            self.bias = self.pool.bias()
        if self.pool is not None and not self.packed:
            if self.bound < self.sizes.history_rows:  # a hidden row must still be a number, and calls left their own rows there
                free = (self.pool.count == 0)[..., None]
                self.keys[:, :, rows].masked_fill_(free, 0)
                self.values[:, :, rows].masked_fill_(free, 0)
            if tables is not None:
                turned = rotate_rows(self.pool.occupied(self.pool.keys), self.pool.frame, self.pool.cell, tables)
                self.keys[:, :, rows] = turned.to(self.keys.dtype)
        if tables is None:
            return
        if self.settings.reindex_span is not None and slots_frames:
            tokens, device = self.sizes.tokens, self.keys.device
            frame = torch.tensor(slots_frames, device=device).repeat_interleave(tokens)[None, None]
            cell = torch.arange(tokens, device=device).repeat(len(slots_frames))[None, None]
            self.keys[:, :, :frame.shape[-1]] = rotate_rows(self.home[:, :, :frame.shape[-1]], frame, cell, tables)

    def occupancy(self) -> torch.Tensor:
        """int32 [3]: most and fewest occupied rows, highest multiplicity: what the host must know once per block."""
        assert self.pool is not None
        used = (self.pool.count > 0).sum(-1)
        return torch.stack([used.amax(), used.amin(), self.pool.count.amax()]).to(torch.int32)

    def clear(self) -> None:
        self.bound, self.biased, self._undo, self.pending, self.recall = 0, False, None, None, None
        if self.moment is not None:
            self.moment.take(None)
        if self.pool is not None:
            self.pool.clear()

    # -- undoing ------------------------------------------------------------------------------------------------------

    def _begin_undo(self, slots: list[int]) -> None:
        """Keeps the pinned slots that the coming commit overwrites."""
        parts = [self.keys, self.values, self.home] if self.moves else [self.keys, self.values]
        rows = [torch.cat([t[:, :, self._frame(s)] for s in slots], 2) for t in parts] if slots else []
        self._undo = _Undo(slots, rows, self.bound, self.biased, None if self.moment is None else self.moment.moment)
        if self.pool is not None:
            self.pool.begin_undo()

    def roll_back(self) -> None:
        """Undoes the last commit."""
        assert self._undo is not None
        undo, self._undo = self._undo, None
        self.bound, self.biased = undo.bound, undo.biased
        for i, slot in enumerate(undo.slots):
            span = self._frame(i)
            self.write_pinned(slot, undo.rows[-1][:, :, span], undo.rows[0][:, :, span], undo.rows[1][:, :, span])
        if self.pool is not None:
            self.pool.roll_back()
        if self.moment is not None:
            self.moment.take(undo.moment)
