"""The `tempcache` cache policy (design: 5). Bookkeeping of frames is common to all layers; rows live in each layer's stores."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..attention import Attention
from ..context import FwdCtx
from ..errors import ConfigError, GeometryError
from ..geometry import RunGeometry
from ..noise import SEED_LIMIT
from ..policies.base import CachePolicy, PolicySettings
from ..positions import RopeSpec, Rotary
from .settings import TempCacheSettings
from .store import LayerStore, StoreSizes

USAGE_QUERIES = 64
_LAYER_STRIDE = 7919


@dataclass
class _Call:
    """Plan of the current call. ``hidden``: nothing stored is visible. ``rewritten``: (frame index in the call, slot) pairs that
    replace pinned rows in place (recache); then no own rows are added."""

    ctx: FwdCtx
    positions: list[int]
    hidden: bool = False
    rewritten: list[tuple[int, int]] | None = None


def store_sizes(settings: TempCacheSettings, sink: int, geometry: RunGeometry) -> StoreSizes:
    """Splits the budget; raises ConfigError when nothing is left for the history."""
    pinned = sink + settings.recent_frames
    rows = int((settings.budget_frames - pinned) * geometry.tokens_per_frame)
    if rows < geometry.tokens_per_frame:
        raise ConfigError(f"a budget of {settings.budget_frames:g} latent frames leaves no room for history beside a sink of {sink} "
                          f"and {settings.recent_frames} recent frames; set it to {pinned + 1} or more")
    rows = min(rows, geometry.total_frames * geometry.tokens_per_frame)
    own = max(geometry.block, geometry.call_frames)
    return StoreSizes(sink, settings.recent_frames, own, rows, geometry.rows, geometry.cols)


class TempCache(CachePolicy):
    """History in merged groups behind a pinned sink and an exact recent range."""

    def __init__(self, settings: PolicySettings, geometry: RunGeometry, rope: RopeSpec, attention: Attention) -> None:
        if settings.tempcache is None:
            raise ConfigError("policy tempcache needs its settings; connect the FAST-AR TempCache node")
        self.settings = settings.tempcache
        self.recache_mode = settings.recache
        self.sizes = store_sizes(self.settings, settings.sink_frames, geometry)
        self.geometry = geometry
        self.attention = attention
        self.rotary = Rotary(rope, geometry.rows, geometry.cols)
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None
        self.reset()

    def reset(self) -> None:
        self.end = 0
        self.first = 0
        self.frames: list[int] = []  # pinned slot -> frame: the sink first, then the recent ring
        self._stores: dict[int, list[tuple[list[int] | None, LayerStore]]] = {}
        self._call: _Call | None = None
        self._undo: tuple[int, list[int]] | None = None
        self._tables = None

    def bytes(self) -> int:
        return sum(store.bytes() for store in self._all_stores()) + self.rotary.bytes()

    def _all_stores(self) -> list[LayerStore]:
        return [store for stores in self._stores.values() for _, store in stores]

    def visible_frames(self, start: int, num_frames: int) -> tuple[int, ...]:
        """Every frame counts as visible: those that left the recent range are represented by their groups."""
        return tuple(range(start + num_frames))

    # -- positions ----------------------------------------------------------------------------------------------------

    def position(self, frames: torch.Tensor, start: int) -> torch.Tensor:
        """Rotary position of each frame for a call that starts at ``start``.

        With a re-index span, frames older than the recent range are squeezed so that the oldest stands ``span`` before the call:
        no distance ever exceeds what the model was trained on. Relative places are what RoPE sees, so the base may move.
        """
        span = self.settings.reindex_span
        if span is None:
            return frames
        age = start - frames
        exact = min(self.settings.recent_frames, span)
        if start > span:
            old = exact + (age - exact).double() * (span - exact) / max(1, start - exact)
            age = torch.where(age > exact, old.round().long(), age)
        return span - age

    def _positions(self, frames: list[int], start: int) -> list[int]:
        return self.position(torch.tensor(frames, dtype=torch.int64), start).tolist()

    # -- planning -----------------------------------------------------------------------------------------------------

    def begin(self, ctx: FwdCtx) -> None:
        if ctx.phase == "prefill" and ctx.start == 0 and self.end > 0:
            self._restart()
        frames = list(range(ctx.start, ctx.end))
        call = _Call(ctx, self._positions(frames, ctx.start))
        if ctx.phase == "recache":
            if ctx.end != self.end:
                raise GeometryError(f"a recache must end at the last committed latent frame {self.end}, not {ctx.end}")
            if self.recache_mode == "drop":
                self._restart()
                self.end = self.first = ctx.start
            else:
                call.rewritten = [(f - ctx.start, self.frames.index(f)) for f in frames if f in self.frames]
                call.positions = self._positions(frames, self.end)
        elif ctx.start != self.end:
            again = ctx.start == 0 and ctx.end <= len(self.frames) and all(f in self.frames for f in frames)
            if not (again or (ctx.start == 0 and ctx.phase == "denoise")):
                raise GeometryError(f"a {ctx.phase} call starts at latent frame {ctx.start}, but {self.end} frames are committed; "
                                    "blocks must follow each other and be committed by a clean pass")
            call.hidden = True
        if ctx.num_frames > self.sizes.own and call.rewritten is None:
            raise GeometryError(f"a call of {ctx.num_frames} latent frames is longer than the {self.sizes.own} the cache was planned "
                                "for; lower the block size")
        self._call = call

    def _restart(self) -> None:
        """Forgets all frames; the memory is kept."""
        self.end = self.first = 0
        self.frames = []
        self._undo = None
        for store in self._all_stores():
            store.bound, store.biased = 0, False
            if store.pool is not None:
                store.pool.clear()

    # -- one layer ----------------------------------------------------------------------------------------------------

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: FwdCtx) -> torch.Tensor:
        call = self._call
        if call is None or call.ctx != ctx:
            raise GeometryError(f"attend for frames {ctx.start}..{ctx.end - 1} without begin(); the model was called outside "
                                "the driver")
        rotated_q, rotated_k = (self.rotary.rotate(x, call.positions) for x in (q, k))
        parts = []
        stores = self._layer_stores(layer, k)
        for heads, store in stores:
            picked = [x if heads is None else x[:, :, heads] for x in (rotated_q, rotated_k, k, v, q)]
            parts.append(self._attend_store(layer, store, call, *(x.transpose(1, 2) for x in picked)))
        if len(parts) == 1:
            return parts[0]
        out = torch.empty_like(q)
        for (heads, _), part in zip(stores, parts):
            out[:, :, heads] = part
        return out

    def _layer_stores(self, layer: int, k: torch.Tensor) -> list[tuple[list[int] | None, LayerStore]]:
        if layer not in self._stores:
            heads = k.shape[2]
            quiet = sorted(h for at, h in self.settings.quiet_heads if at == layer and h < heads)
            busy = [h for h in range(heads) if h not in quiet]
            bare = StoreSizes(self.sizes.sink, self.sizes.recent, self.sizes.own, 0, self.sizes.rows, self.sizes.cols)
            like = k.transpose(1, 2)
            if not quiet:
                self._stores[layer] = [(None, LayerStore(self.sizes, self.settings, like))]
            else:
                self._stores[layer] = [(part, LayerStore(sizes, self.settings, like[:, part]))
                                       for part, sizes in ((busy, self.sizes), (quiet, bare)) if part]
        return self._stores[layer]

    def _attend_store(self, layer: int, store: LayerStore, call: _Call, q: torch.Tensor, keys: torch.Tensor, raw: torch.Tensor,
                      v: torch.Tensor, raw_q: torch.Tensor) -> torch.Tensor:
        filled = len(self.frames)
        if call.rewritten is not None:
            tokens = self.sizes.tokens
            for i, slot in call.rewritten:
                span = slice(i * tokens, (i + 1) * tokens)
                store.write_pinned(slot, raw[:, :, span], keys[:, :, span], v[:, :, span])
            start, stop = 0, filled * tokens + store.bound
        else:
            own = store.write_own(keys, v, filled)
            start, stop = own if call.hidden else 0, own + keys.shape[2]
        if call.ctx.commits:
            self._observe(layer, store, call, q, raw, raw_q, start, stop)
        bias = store.bias[:, :, start:stop] if store.biased and not call.hidden else None
        k_seen, v_seen = (t[:, :, start:stop].transpose(1, 2) for t in (store.keys, store.values))
        return self.attention.attend(q.transpose(1, 2), k_seen, v_seen, bias)

    def _observe(self, layer: int, store: LayerStore, call: _Call, q: torch.Tensor, raw: torch.Tensor, raw_q: torch.Tensor,
                 start: int, stop: int) -> None:
        """What a commit needs from a clean pass: the raw keys, where the own rows stand, who was looked at."""
        ctx = call.ctx
        if call.rewritten is None:
            store.pending = (raw, stop - raw.shape[2])
        seed = (self.settings.seed * _LAYER_STRIDE + layer) * _LAYER_STRIDE + ctx.start
        generator = torch.Generator().manual_seed(seed % SEED_LIMIT)
        chosen = torch.randint(q.shape[2], (min(USAGE_QUERIES, q.shape[2]),), generator=generator)
        if store.pool is not None:
            store.measure(q, stop, start, chosen.to(q.device))
        if store.moment is not None:
            store.moment.update(raw_q)

    # -- commit -------------------------------------------------------------------------------------------------------

    def commit(self, ctx: FwdCtx) -> None:
        call, self._call = self._call, None
        if call is None or not ctx.commits or call.rewritten is not None:
            self._undo = None if call is not None and call.rewritten is not None else self._undo
            return
        before = list(self.frames)
        leaving, kept = self._leaving(ctx, call.hidden)
        self._undo = (ctx.start, before)
        for store in self._all_stores():
            self._commit_store(store, ctx, before, leaving, kept)
        self.frames = kept
        self.end = ctx.end
        self._refresh()

    def _leaving(self, ctx: FwdCtx, again: bool) -> tuple[list[int], list[int]]:
        """Frames that leave the recent range in order of age, and the pinned slots afterwards."""
        if again:
            return [], list(self.frames)
        slots = list(self.frames)
        leaving = []
        newest = ctx.end - self.sizes.recent
        for frame in range(ctx.start, ctx.end):
            if len(slots) < self.sizes.pinned_frames and (frame - self.first < self.sizes.sink or frame >= newest):
                slots.append(frame)
            elif frame < newest:
                leaving.append(frame)
            else:
                old = min(range(self.sizes.sink, len(slots)), key=lambda s: slots[s])
                leaving.append(slots[old])
                slots[old] = frame
        return sorted(leaving), slots

    def _commit_store(self, store: LayerStore, ctx: FwdCtx, before: list[int], leaving: list[int], kept: list[int]) -> None:
        assert store.pending is not None
        raw, own_start = store.pending
        store.pending = None
        changed = [s for s, f in enumerate(kept) if ctx.start <= f < ctx.end]
        store.begin_undo([s for s in changed if s < len(before)])
        tokens = self.sizes.tokens
        own_v = store.values[:, :, own_start:own_start + raw.shape[2]].clone()
        own_k = store.keys[:, :, own_start:own_start + raw.shape[2]].clone()
        if store.pool is not None:
            filled = len(before) * tokens
            store.pool.use(store.mass[:, :, filled:filled + self.sizes.history_rows])
        for frame in leaving:
            if frame >= ctx.start:
                span = slice((frame - ctx.start) * tokens, (frame - ctx.start + 1) * tokens)
                usage = store.mass[:, :, own_start + span.start:own_start + span.stop]
                store.ingest(raw[:, :, span], own_v[:, :, span], frame, usage)
            else:
                span = store.span(before.index(frame))
                store.ingest(store.raw[:, :, span], store.values[:, :, span], frame, store.mass[:, :, span])
        for slot in changed:
            span = slice((kept[slot] - ctx.start) * tokens, (kept[slot] - ctx.start + 1) * tokens)
            store.write_pinned(slot, raw[:, :, span], own_k[:, :, span], own_v[:, :, span])

    def _refresh(self) -> None:
        """The one rotated copy per block, and the one host read: how many history rows each layer really uses."""
        stores = [s for s in self._all_stores() if s.pool is not None]
        if not stores:
            return
        device = stores[0].keys.device
        position = self.position(torch.arange(self.end + self.sizes.own), self.end).clamp_min(0)
        if self._tables is None or self._tables[0].shape[0] <= int(position.max()):
            self._tables = self.rotary.row_table(self._table_rows(), device)
        for store in stores:
            store.refresh(len(self.frames), position.to(device), self._tables)
        if self.settings.reindex_span is not None:
            self._rotate_pinned()
        for store, (most, fewest, highest) in zip(stores, torch.stack([s.occupancy() for s in stores]).tolist()):
            store.bound = most
            store.biased = highest > 1 or fewest < most

    def _table_rows(self) -> int:
        span = self.settings.reindex_span
        longest = self.geometry.total_frames if span is None else span
        return longest + self.sizes.own + 1

    def _rotate_pinned(self) -> None:
        positions = self._positions(self.frames, self.end)
        for store in self._all_stores():
            rows = len(self.frames) * self.sizes.tokens
            rotated = self.rotary.rotate(store.raw[:, :, :rows].transpose(1, 2), positions)
            store.keys[:, :, :rows] = rotated.transpose(1, 2)

    def rollback(self, start: int) -> None:
        if self._undo is None or self._undo[0] != start:
            kept = "nothing" if self._undo is None else f"the block at latent frame {self._undo[0]}"
            raise GeometryError(f"cannot roll back to latent frame {start}: the cache can undo {kept}; deeper steps replay "
                                "clean passes from the run's latents")
        for store in self._all_stores():
            store.roll_back()
        self.frames = self._undo[1]
        self.end = start
        self._undo = None
        self._call = None
        self._refresh()
