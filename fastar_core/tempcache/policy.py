"""The `tempcache` cache policy (design: 5). Bookkeeping of frames is common to all layers; rows live in each layer's stores."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..attention import Attention
from ..context import FwdCtx
from ..errors import ConfigError, GeometryError
from ..geometry import RunGeometry
from ..key_rows import KeyRows, frame_parts
from ..noise import SEED_LIMIT
from ..policies.base import CachePolicy, PolicySettings
from ..positions import RopeSpec, Rotary
from .ledger import Ledger
from .settings import FAMILY_SPAN
from .sizes import StoreSizes, store_sizes
from .stats import TempCacheStats
from .store import LayerStore, Tables

USAGE_QUERIES = 32  # 64 give the same recall to three digits (four tours) and cost twice as much
_LAYER_STRIDE = 7919


@dataclass
class _Call:
    """Plan of the current call. ``rewritten``: (frame index in the call, slot) pairs that replace pinned rows in place (recache);
    then no own rows are added."""

    ctx: FwdCtx
    positions: list[int]
    rewritten: list[tuple[int, int]] | None = None


class TempCache(CachePolicy):
    """History in merged groups behind a pinned sink and an exact recent range."""

    def __init__(self, settings: PolicySettings, geometry: RunGeometry, rope: RopeSpec, attention: Attention) -> None:
        if settings.tempcache is None:
            raise ConfigError("policy tempcache needs its settings; connect the FAST-AR TempCache node")
        if settings.sink_frames < 0 or settings.tempcache.reindex_span == FAMILY_SPAN:
            raise ConfigError(f"sink_frames {settings.sink_frames} and re-index span {settings.tempcache.reindex_span} must be filled in "
                              "by fit_family before a run")
        self.settings = settings.tempcache
        self.recache_mode = settings.recache
        self.sizes = store_sizes(self.settings, settings.sink_frames, geometry)
        self.attention = attention
        self.rotary = Rotary(rope, geometry.rows, geometry.cols)
        self.reset()

    def reset(self) -> None:
        self.ledger = Ledger(self.sizes.sink, self.sizes.recent)
        self.stats = TempCacheStats()
        self._stores: dict[int, list[tuple[list[int] | None, LayerStore]]] = {}
        self._call: _Call | None = None
        self._undo: tuple[int, list[int]] | None = None
        self.tables: Tables | None = None
        self._offset = self._last_end = 0  # frames of finished timelines before the current one; end of the last call

    def bytes(self) -> int:
        tables = sum(t.numel() * t.element_size() for t in self.tables or ())
        return sum(store.bytes() for store in self._all_stores()) + self.rotary.bytes() + tables

    def stores(self, layer: int) -> list[LayerStore]:
        """Stores of one layer (two when some of its heads keep no history); empty before its first call."""
        return [store for _, store in self._stores.get(layer, [])]

    @property
    def call_positions(self) -> list[int]:
        """Rotary position of each frame of the current call."""
        return [] if self._call is None else list(self._call.positions)

    def _all_stores(self) -> list[LayerStore]:
        return [store for stores in self._stores.values() for _, store in stores]

    def visible_frames(self, start: int, num_frames: int) -> tuple[int, ...]:
        """Every frame counts as visible: those that left the recent range are represented by their groups."""
        return tuple(range(self.ledger.first, start + num_frames))

    # -- positions ----------------------------------------------------------------------------------------------------

    def position(self, frames: torch.Tensor, start: int) -> torch.Tensor:
        """Rotary position of each frame for a call that starts at ``start``.

        With a re-index span, frames older than the recent range are squeezed so that the oldest stands ``span`` before the call:
        no distance exceeds what the model was trained on. Relative places are what RoPE sees, so the base may move.
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

    def _positions(self, frames: range, start: int) -> list[int]:
        return self.position(torch.tensor(frames, dtype=torch.int64), start).tolist()

    def _renew_tables(self) -> None:
        """How home keys of each frame and cell are turned for the next call; None when they already stand where they should."""
        post, stores, self.tables = self.settings.space == "post", self._all_stores(), None
        if (post and self.settings.reindex_span is None) or not stores:
            return
        frames = torch.arange(self.ledger.end + self.sizes.own)
        shift = self.position(frames, self.ledger.end) - (frames if post else 0)
        cos, sin = self.rotary.row_tables(shift, spatial=not post)
        self.tables = (cos.to(stores[0].keys.device), sin.to(stores[0].keys.device))

    # -- planning -----------------------------------------------------------------------------------------------------

    def _here(self, ctx: FwdCtx) -> FwdCtx:
        """The call in frames of all timelines together."""
        return replace(ctx, start=ctx.start + self._offset) if self._offset else ctx

    def begin(self, ctx: FwdCtx) -> None:
        if ctx.phase == "prefill" and ctx.start == 0 and self.ledger.end > 0:
            if self.settings.carry_frames and self.recache_mode != "rebuild":
                self._carry_over()
            else:
                self._restart(0)
        ctx = self._here(ctx)
        self._last_end = ctx.end
        frames = range(ctx.start, ctx.end)
        if ctx.phase == "recache":
            self._call = self._plan_recache(ctx, frames)
            return
        if ctx.start != self.ledger.end:
            if self._undo is None or self._undo[0] != ctx.start:
                raise GeometryError(f"a {ctx.phase} call starts at latent frame {ctx.start}, but {self.ledger.end} frames are "
                                    "committed; blocks must follow each other and be committed by a clean pass")
            self.rollback(ctx.start - self._offset)  # the last block is made anew, as a growing window of a rolling run does
        self._check_length(ctx)
        self._call = _Call(ctx, self._positions(frames, ctx.start))

    def _check_length(self, ctx: FwdCtx) -> None:
        if ctx.num_frames > self.sizes.own:
            raise GeometryError(f"a call of {ctx.num_frames} latent frames is longer than the {self.sizes.own} the cache was planned "
                                "for; lower the block size")

    def _plan_recache(self, ctx: FwdCtx, frames: range) -> _Call:
        """"keep": frames still pinned are rewritten, groups made under the old prompt stay. "drop": the store starts anew."""
        if ctx.end != self.ledger.end:
            raise GeometryError(f"a recache must end at the last committed latent frame {self.ledger.end}, not {ctx.end}")
        if self.recache_mode == "drop":
            self._check_length(ctx)
            self._restart(ctx.start)
            return _Call(ctx, self._positions(frames, ctx.start))
        slots = self.ledger.frames
        rewritten = [(f - ctx.start, slots.index(f)) for f in frames if f in slots]
        return _Call(ctx, self._positions(frames, ctx.end), rewritten)

    def _carry_over(self) -> None:
        """A new timeline begins with the last frames of the old one: what was pinned joins the history, which stays."""
        pinned = sorted(self.ledger.frames)
        for store in self._all_stores():
            store.absorb([(frame, self.ledger.frames.index(frame)) for frame in pinned])
        self._offset = max(self.ledger.end, self._last_end) - self.settings.carry_frames
        self.ledger.restart(self._offset)
        self._undo = None
        self._refresh()

    def _restart(self, first: int) -> None:
        """Forgets all frames; the memory is kept."""
        self._offset = 0
        self.ledger.restart(first)
        self._undo = self.tables = None
        for store in self._all_stores():
            store.clear()

    # -- one layer ----------------------------------------------------------------------------------------------------

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: FwdCtx) -> torch.Tensor:
        call, ctx = self._call, self._here(ctx)
        if call is None or call.ctx != ctx:
            raise GeometryError(f"attend for frames {ctx.start}..{ctx.end - 1} without begin(); the model was called outside "
                                "the driver")
        turned = [self.rotary.rotate(x, call.positions) for x in (q, k)]
        home = self._home(q, k, turned, ctx) if ctx.commits else turned
        stores = self._layer_stores(layer, k)
        out = torch.empty_like(q)
        for heads, store in stores:
            picked = [(x if heads is None else x[:, :, heads]).transpose(1, 2) for x in (*turned, v, *home)]
            part = self._attend_store(layer, store, call, *picked)
            if heads is None:
                return part
            out[:, :, heads] = part
        return out

    def _home(self, q: torch.Tensor, k: torch.Tensor, turned: list[torch.Tensor], ctx: FwdCtx) -> list[torch.Tensor]:
        """Queries and keys in the space where keys are compared."""
        if self.settings.space == "pre":
            return [q, k]
        if self.settings.reindex_span is None:
            return turned
        return [self.rotary.rotate(x, list(range(ctx.start, ctx.end))) for x in (q, k)]

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
            for store in self.stores(layer):
                if store.pool is not None:
                    store.pool.search.backend = self.attention.backend
        return self._stores[layer]

    def _attend_store(self, layer: int, store: LayerStore, call: _Call, q: torch.Tensor, keys: torch.Tensor, v: torch.Tensor,
                      home_q: torch.Tensor, home_k: torch.Tensor) -> torch.Tensor:
        filled, tokens = len(self.ledger.frames), self.sizes.tokens
        own = None
        if call.rewritten is not None:
            for i, slot in call.rewritten:
                span = slice(i * tokens, (i + 1) * tokens)
                store.write_pinned(slot, home_k[:, :, span], keys[:, :, span], v[:, :, span])
        else:
            own = store.write_own(keys, v, filled)
        k_seen, v_seen, bias = store.visible(filled, own, self.tables)
        if call.ctx.commits and own is not None:
            chosen = self._chosen(layer, q.shape[2], call.ctx.start).to(q.device)
            store.hold(own, home_q, home_k, q[:, :, chosen] if store.pool is not None else None)
        rows = None if self.attention.sparse is None else self._key_rows(layer, store, call.ctx, own)
        return self.attention.attend(q.transpose(1, 2), k_seen.transpose(1, 2), v_seen.transpose(1, 2), bias, rows=rows)

    def _key_rows(self, layer: int, store: LayerStore, ctx: FwdCtx, own: slice | None) -> KeyRows:
        """[pinned frames | merged history | own frames], as ``visible`` lays them out."""
        tokens, pool, bound = self.sizes.tokens, store.pool, store.bound
        pinned = frame_parts(list(self.ledger.frames), tokens)
        after = len(pinned) * tokens
        called = [] if own is None else list(range(ctx.start, ctx.end))
        parts = (*pinned, (after, bound, None), *frame_parts(called, tokens, after + bound))
        places = None if pool is None else lambda: (pool.frame * tokens + pool.cell)[:, :, :bound]
        part = [s for _, s in self._stores[layer]].index(store)
        return KeyRows(layer, ctx, self, parts, self.ledger.first + self.sizes.sink, places, part)

    def _chosen(self, layer: int, rows: int, start: int) -> torch.Tensor:
        """The seeded queries that usage and step recall are measured with."""
        seed = (self.settings.seed * _LAYER_STRIDE + layer) * _LAYER_STRIDE + start
        generator = torch.Generator().manual_seed(seed % SEED_LIMIT)
        return torch.randint(rows, (min(USAGE_QUERIES, rows),), generator=generator)

    # -- commit -------------------------------------------------------------------------------------------------------

    def commit(self, ctx: FwdCtx) -> None:
        call, self._call, ctx = self._call, None, self._here(ctx)
        if call is None or not ctx.commits:
            return
        if call.rewritten is not None:
            self._undo = None
            return
        move = self.ledger.plan(ctx)
        if self.tables is None:  # frames may leave in the first commit of a timeline already
            self._renew_tables()
        for store in self._all_stores():
            store.commit(move, ctx.start, self.tables)
        self._undo = (ctx.start, move.before)
        self.ledger.frames, self.ledger.end = move.after, ctx.end
        self._refresh()
        self.stats.add(ctx, self._stores, move)

    def _refresh(self) -> None:
        """The one rotated copy per block, and the one host read: how many history rows each layer really uses."""
        stores = [s for s in self._all_stores() if s.pool is not None]
        if not stores and self.settings.reindex_span is None:
            return
        self._renew_tables()
        for store in self._all_stores():
            store.refresh(self.tables, self.ledger.frames)
        if not stores:
            return
        for store, (most, fewest, highest) in zip(stores, torch.stack([s.occupancy() for s in stores]).tolist()):
            store.bound = most
            store.biased = highest > 1 or fewest < most

    def report(self) -> dict[str, object]:
        """Per block and layer: groups, merges, evictions, density, step recall, bytes."""
        return self.stats.report()

    def rollback(self, start: int) -> None:
        start += self._offset
        if self._undo is None or self._undo[0] != start:
            kept = "nothing" if self._undo is None else f"the block at latent frame {self._undo[0]}"
            raise GeometryError(f"cannot roll back to latent frame {start}: the cache can undo {kept}; deeper steps replay "
                                "clean passes from the run's latents")
        for store in self._all_stores():
            store.roll_back()
        self.ledger.frames, self.ledger.end = self._undo[1], start
        self._undo = self._call = None
        self.stats.drop_last()
        self._refresh()
