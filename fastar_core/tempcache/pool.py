"""The groups of one layer in a fixed number of rows: representative key, mean value, multiplicity, position, usage.

A row is free while its multiplicity is 0, and occupied rows stand in front. Everything is chosen by top-k and masks of fixed
size: no loop over tokens. A frame that leaves the recent range is taken in as a whole (`ingest`): tokens join groups, the rest
take free rows or those of the least used groups. Only the rows a frame touches are written.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .features import QueryMoment, features
from .matching import NO_MATCH, Search, local_best, neighbour_mask
from .regroup import Fold, choose_folds, fold_rows, least_used
from .rows import MeanRows, PackedRows
from .settings import TempCacheSettings

PROTECTED = float("inf")


@dataclass
class Ingested:
    """Where the tokens of one frame went: slot and merged (False = opened a group) [B, G, S], similarity [B, G, S], opened rows
    and rows that lost a group [B, G, capacity]."""

    slot: torch.Tensor
    merged: torch.Tensor
    similarity: torch.Tensor
    opened: torch.Tensor
    evicted: torch.Tensor
    fold: Fold | None = None

    def counts(self) -> torch.Tensor:
        """int64 [4]: tokens merged, groups opened, evicted, and folded into others."""
        done = torch.zeros_like(self.merged) if self.fold is None else self.fold.done
        return torch.stack([t.sum() for t in (self.merged, self.opened, self.evicted, done)])


@dataclass
class _Undo:
    """What begin_undo() found: the narrow tensors (replaced later, never changed in place), and rows before each ingest."""

    narrow: list[torch.Tensor]
    wide: list[tuple[torch.Tensor, list[list[torch.Tensor]]]] = field(default_factory=list)

    def tensors(self) -> list[torch.Tensor]:
        return [*self.narrow, *(t for slot, parts in self.wide for t in (slot, *(x for part in parts for x in part)))]


def per_head(index: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """Row index [B, G, N] as a gather index [B, H, N, D]."""
    return index.expand(-1, heads, -1)[..., None].expand(-1, -1, -1, dim)


class HistoryPool:
    """``capacity`` rows per head of one layer. G = 1 when heads share decisions, else the number of heads.

    ``keys`` and ``values`` are where the rows live: views into the attention buffer, or packed rows.
    """

    def __init__(self, keys: MeanRows | PackedRows, values: MeanRows | PackedRows, like: torch.Tensor, rows: int, cols: int,
                 settings: TempCacheSettings) -> None:
        batch, heads, capacity, dim = like.shape
        self.capacity, self.heads, self.dim = capacity, heads, dim
        self.settings = settings
        self.groups = 1 if settings.shared else heads
        self.keys, self.values = keys, values
        shape, device = (batch, self.groups, capacity), like.device
        self.count = torch.zeros(shape, dtype=torch.int32, device=device)
        self.frame = torch.zeros(shape, dtype=torch.int64, device=device)
        self.cell = torch.zeros(shape, dtype=torch.int64, device=device)
        self.usage = torch.zeros(shape, dtype=torch.float32, device=device)
        self.last_slots = torch.full((batch, self.groups, rows * cols), -1, dtype=torch.int64, device=device)
        self.mean = MeanRows(torch.zeros(like.shape, dtype=torch.float32, device=device)) if settings.representative == "medoid" \
            else None
        self.grid = (rows, cols)
        self.search = Search(settings)
        self.undo: _Undo | None = None
        self.clear()

    def _wide(self) -> list[MeanRows | PackedRows]:
        return [self.keys, self.values] if self.mean is None else [self.keys, self.values, self.mean]

    def _narrow(self) -> list[torch.Tensor]:
        return [self.count, self.frame, self.cell, self.usage, self.last_slots]

    def tensors(self) -> list[torch.Tensor]:
        """Everything that makes up the state, in a fixed order (for copies and digests)."""
        return [*(t for rows in self._wide() for t in rows.tensors()), *self._narrow()]

    def held(self) -> list[torch.Tensor]:
        """Every tensor in memory: the state, what a roll-back would restore, and the planes of a hash search."""
        return [*self.tensors(), *([] if self.undo is None else self.undo.tensors()), *self.search.tensors()]

    def clear(self) -> None:
        """Frees every row; the memory is kept."""
        for rows in self._wide():
            rows.clear()
        self.count.zero_()
        self.usage.zero_()
        self.last_slots.fill_(-1)
        self.undo = None

    def occupied(self, rows: MeanRows | PackedRows) -> torch.Tensor:
        """float32 ``keys`` or ``values`` [B, H, capacity, D]; free rows are 0 whatever the memory holds there."""
        return rows.read().masked_fill((self.count == 0)[..., None], 0)

    # -- choosing -----------------------------------------------------------------------------------------------------

    def _match(self, k: torch.Tensor, moment: QueryMoment | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Similarity and row of the best match [B, G, S], and the features of the pool."""
        settings = self.settings
        tokens = features(k, moment, settings.shared)
        pool = features(self.occupied(self.keys), moment, settings.shared)
        if moment is not None:  # a common shift changes no distance, and near zero less is lost to rounding
            centre = tokens.mean(2, keepdim=True)
            tokens, pool = tokens - centre, pool - centre
        near = neighbour_mask(*self.grid, settings.neighbourhood, k.device)
        near_score, near_slot = local_best(tokens, pool, self.last_slots, near, settings.similarity == "logit")
        missed = near_score < settings.threshold
        far_score, far_slot = self.search.best(tokens, pool, self.count > 0, missed)
        use_near = ~missed | (near_score >= far_score)
        return torch.where(use_near, near_score, far_score), torch.where(use_near, near_slot, far_slot), pool

    def _who_merges(self, score: torch.Tensor) -> torch.Tensor:
        """By the threshold; beyond that, as many of the best matches above the floor as free rows are lacking."""
        if self.settings.threshold > 1:
            return torch.zeros_like(score, dtype=torch.bool)
        free = (self.count == 0).sum(-1, keepdim=True)
        rank = score.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        needed = rank < (score.shape[-1] - free)
        return (score > NO_MATCH) & ((score >= self.settings.threshold) | (needed & (score >= self.settings.floor)))

    def _slots(self, merged: torch.Tensor, match: torch.Tensor) -> torch.Tensor:
        """Slots of all tokens: the match, or the next free or least used row that nobody joins."""
        free = torch.arange(-self.capacity, 0, device=self.usage.device, dtype=self.usage.dtype)
        usage = torch.where(self.count == 0, free, self.usage)  # free rows first, the lowest first: occupied rows stay in front
        taken = torch.zeros_like(usage).scatter_add(2, match, merged.float())
        usage = usage.masked_fill(taken > 0, PROTECTED)
        order = usage.argsort(dim=-1, stable=True)[..., :match.shape[-1]]  # stable: the same choice on every device
        rank = ((~merged).cumsum(-1) - 1).clamp(0, order.shape[-1] - 1)
        return torch.where(merged, match, torch.gather(order, 2, rank))

    def _fold(self, score: torch.Tensor, pool: torch.Tensor) -> Fold:
        """Little used rows join their nearest row where that costs less than a token's poor match."""
        victim = least_used(self.usage, self.count, fold_rows(score.shape[-1], self.capacity))
        others = (self.count > 0).scatter(2, victim, False)
        wide = victim[..., None].expand(-1, -1, -1, pool.shape[-1])
        free = (self.count == 0).sum(-1, keepdim=True)
        lacking = (score < self.settings.threshold).sum(-1, keepdim=True) > free
        asked = (torch.gather(self.count, 2, victim) > 0) & lacking
        likeness, target = self.search.best(torch.gather(pool, 2, wide), pool, others, asked)
        fold = choose_folds(score, victim, target, likeness, free, self.settings.threshold, self.settings.floor)
        self._join(fold)
        return fold

    def _join(self, fold: Fold) -> None:
        """Moves the members of the victims to their targets and frees the victims' rows."""
        self._remember(fold.target)
        index, source = (per_head(rows, self.heads, self.dim) for rows in (fold.target, fold.victim))
        moved = torch.where(fold.done, torch.gather(self.count, 2, fold.victim), 0)
        held = torch.gather(self.count, 2, fold.target)
        same = (fold.target[..., :, None] == fold.target[..., None, :]).float() * moved[..., None, :]
        total = held + same.sum(-1)
        for rows in (self.keys, self.values):
            joined = same.expand(-1, self.heads, -1, -1) @ torch.where(moved[..., None] > 0, rows.pick(source), 0)
            mean = (torch.where(held[..., None] > 0, rows.pick(index) * held[..., None], 0) + joined) / total.clamp_min(1)[..., None]
            rows.write(index, mean)
        self.count = self.count.scatter(2, fold.target, total.to(self.count.dtype))
        self.count = self.count * (1 - torch.zeros_like(self.count).scatter(2, fold.victim, fold.done.to(self.count.dtype)))
        newest = torch.where(fold.done, torch.gather(self.frame, 2, fold.victim), 0)
        self.frame = self.frame.scatter_reduce(2, fold.target, newest, "amax")

    # -- changing -----------------------------------------------------------------------------------------------------

    def ingest(self, k: torch.Tensor, v: torch.Tensor, frame: int, usage: torch.Tensor,
               moment: QueryMoment | None) -> Ingested:
        """Takes in one frame: k and v [B, H, S, D], usage [B, G, S]. Needs capacity >= S."""
        score, match, pool = self._match(k, moment)
        fold = self._fold(score, pool) if self.settings.folds else None
        if fold is not None:
            match = fold.remap(match, self.capacity)
        merged = self._who_merges(score)
        slot = self._slots(merged, match)
        self._remember(slot)
        opened = torch.zeros_like(self.count).scatter_add(2, slot, (~merged).int()) > 0
        evicted = opened & (self.count > 0)
        before = self.count.masked_fill(opened, 0)
        joined = torch.zeros_like(self.count).scatter_add(2, slot, torch.ones_like(slot, dtype=torch.int32))
        newest = self._newest(slot)
        index = per_head(slot, self.heads, self.dim)
        self.values.write(index, self._means(self.values, v, slot, before, joined))
        self._represent(k, slot, before, joined, newest)
        self.count = before + joined
        touched = joined > 0
        self.frame = self.frame.masked_fill(touched, frame)
        self.cell = torch.where(touched, newest, self.cell)
        mine = torch.gather(usage, 2, newest)
        self.usage = torch.where(touched, torch.where(opened, mine, torch.maximum(mine, self.usage)), self.usage)
        self.last_slots = slot
        return Ingested(slot, merged, score, opened, evicted, fold)

    def _newest(self, slot: torch.Tensor) -> torch.Tensor:
        """Highest token number that went to each row [B, G, capacity] (0 where none did)."""
        tokens = torch.arange(slot.shape[-1], device=slot.device).expand_as(slot)
        return torch.zeros_like(self.cell).scatter_reduce(2, slot, tokens, "amax")

    def _means(self, held: MeanRows | PackedRows, new: torch.Tensor, slot: torch.Tensor, before: torch.Tensor,
               joined: torch.Tensor) -> torch.Tensor:
        """New running means [B, H, S, D] (float32) of the rows that the tokens go to, weighted by multiplicity.

        Tokens of one row are summed by a product with a 0/1 matrix [S, S]: a fixed order on every device.
        """
        index = per_head(slot, self.heads, self.dim)
        same = (slot[..., :, None] == slot[..., None, :]).float()
        total = same.expand(-1, self.heads, -1, -1) @ new.float()
        old = torch.gather(before, 2, slot)[..., None].float()
        count = old + torch.gather(joined, 2, slot)[..., None].float()
        return (torch.where(old > 0, held.pick(index) * old, 0) + total) / count

    def _represent(self, k: torch.Tensor, slot: torch.Tensor, before: torch.Tensor, joined: torch.Tensor,
                   newest: torch.Tensor) -> None:
        index = per_head(slot, self.heads, self.dim)
        if self.settings.representative == "mean":
            self.keys.write(index, self._means(self.keys, k, slot, before, joined))
            return
        latest = torch.gather(k, 2, per_head(torch.gather(newest, 2, slot), self.heads, self.dim)).float()
        if self.mean is None:
            self.keys.write(index, latest)
            return
        mean = self._means(self.mean, k, slot, before, joined)
        self.mean.write(index, mean)
        held = self.keys.pick(index)
        fresh = (torch.gather(before, 2, slot) == 0).expand(-1, self.heads, -1)[..., None]
        closer = (latest - mean).square().sum(-1, keepdim=True) <= (held - mean).square().sum(-1, keepdim=True)
        self.keys.write(index, torch.where(fresh | closer, latest, held))

    def use(self, mass: torch.Tensor) -> None:
        """Updates the running usage of occupied rows with the attention mass [B, G, capacity] of a clean pass."""
        decay = self.settings.usage_decay
        self.usage = torch.where(self.count > 0, decay * self.usage + (1 - decay) * mass, self.usage)

    # -- undoing ------------------------------------------------------------------------------------------------------

    def _remember(self, slot: torch.Tensor) -> None:
        if self.undo is not None:
            index = per_head(slot, self.heads, self.dim)
            self.undo.wide.append((slot, [rows.raw(index) for rows in self._wide()]))

    def begin_undo(self) -> None:
        """From here on, what changes is remembered, until the next call."""
        self.undo = _Undo(self._narrow())

    def roll_back(self) -> None:
        """Restores the state at begin_undo(), bit for bit."""
        assert self.undo is not None
        for slot, parts in reversed(self.undo.wide):
            index = per_head(slot, self.heads, self.dim)
            for rows, saved in zip(self._wide(), parts):
                rows.restore(index, saved)
        self.count, self.frame, self.cell, self.usage, self.last_slots = self.undo.narrow
        self.undo = None
