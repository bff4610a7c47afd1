"""The groups of one layer in a fixed number of rows: representative key, mean value, multiplicity, position, usage.

A row is free while its multiplicity is 0, and occupied rows stand in front. Everything is chosen by top-k and masks of fixed
size: no loop over tokens. A frame that leaves the recent range is taken in as a whole (`ingest`): tokens join groups, the rest
take free rows or those of the least used groups. Only the rows a frame touches are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ...kernels import registry
from .arrival import Arrival
from .features import QueryMoment
from .matching import NO_MATCH, RowIndex, Search, local_best, pair_similarity
from .regroup import Fold, choose_folds, closest_pairs, fold_rows, highest
from .rows import MeanRows, PackedRows, row_places
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
        self.correction = torch.zeros(shape, dtype=torch.float32, device=device)
        self.near_row = torch.zeros(shape, dtype=torch.int64, device=device)
        self.near_score = torch.full(shape, NO_MATCH, dtype=torch.float32, device=device)
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
        return [self.count, self.frame, self.cell, self.usage, self.correction, self.near_row, self.near_score, self.last_slots]

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
        self.correction.zero_()
        self.near_score.fill_(NO_MATCH)
        self.last_slots.fill_(-1)
        self.undo = None

    def occupied(self, rows: MeanRows | PackedRows) -> torch.Tensor:
        """float32 ``keys`` or ``values`` [B, H, capacity, D]; free rows are 0 whatever the memory holds there."""
        return rows.read().masked_fill((self.count == 0)[..., None], 0)

    # -- choosing -----------------------------------------------------------------------------------------------------

    def open_index(self, moment: QueryMoment | None, leaving: Sequence[torch.Tensor]) -> RowIndex:
        """What the frames of one commit, with keys ``leaving`` [B, H, S, D], are compared with."""
        return RowIndex(self.search, self.keys, self.count > 0, moment, leaving)

    def _match(self, number: int, index: RowIndex) -> tuple[torch.Tensor, torch.Tensor]:
        """Similarity and row of the best match [B, G, S] of the tokens of leaving frame ``number``."""
        settings = self.settings
        far_score, far_slot = index.best(number)
        if number == 0 and settings.search != "lsh":
            return far_score, far_slot  # the whole pool was searched as it is now, the neighbourhood with it
        rows = index.at(self.last_slots.clamp_min(0))
        near_score, near_slot = local_best(index.tokens[number], rows, self.last_slots, self.grid, settings.neighbourhood,
                                           settings.similarity == "logit")
        use_near = (near_score >= settings.threshold) | (near_score >= far_score)
        return torch.where(use_near, near_score, far_score), torch.where(use_near, near_slot, far_slot)

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
        order = highest(-usage, match.shape[-1])
        rank = ((~merged).cumsum(-1) - 1).clamp(0, order.shape[-1] - 1)
        return torch.where(merged, match, torch.gather(order, 2, rank))

    def _fold(self, score: torch.Tensor, index: RowIndex) -> Fold:
        """Groups that are nearly alike join where that costs less than a token's poor match."""
        victim, target = closest_pairs(self.near_row, self.near_score, self.count, fold_rows(score.shape[-1], self.capacity))
        known = torch.gather(self.near_score, 2, victim)
        pairs = index.at(torch.cat([victim, target], -1)).chunk(2, 2)
        likeness = pair_similarity(pairs[0], pairs[1], self.settings.similarity == "logit")
        usable = (known > NO_MATCH) & (torch.gather(self.count, 2, victim) > 0) & (torch.gather(self.count, 2, target) > 0)
        likeness = torch.where(usable & (victim != target), likeness, NO_MATCH)
        self.near_score = self.near_score.scatter(2, victim, likeness)
        fold = choose_folds(score, victim, target, likeness, (self.count == 0).sum(-1, keepdim=True), self.settings.threshold,
                            self.settings.floor)
        self.near_row = fold.remap(self.near_row, self.capacity)
        index.follow(lambda rows: fold.remap(rows, self.capacity))
        self._join(fold)
        return fold

    def _note_nearest(self, tokens: torch.Tensor, score: torch.Tensor, match: torch.Tensor, slot: torch.Tensor, merged: torch.Tensor,
                      index: RowIndex) -> None:
        """Opened rows remember the row most like them: their match, or where the token to the left or above went."""
        inside, number = index.earlier(tokens, *self.grid)
        nearest = torch.where(inside > score, torch.gather(slot, 2, number), match)
        best = torch.maximum(inside, score)
        self.near_row = self.near_row.scatter(2, slot, torch.where(merged, torch.gather(self.near_row, 2, slot), nearest))
        self.near_score = self.near_score.scatter(2, slot, torch.where(merged, torch.gather(self.near_score, 2, slot), best))

    def _join(self, fold: Fold) -> None:
        """Moves the members of the victims to their targets and frees the victims' rows."""
        self._remember(fold.target)
        moved = torch.where(fold.done, torch.gather(self.count, 2, fold.victim), 0)
        held = torch.gather(self.count, 2, fold.target)
        alike = (fold.target[..., :, None] == fold.target[..., None, :]).float()
        same = alike * moved[..., None, :]
        total = held + same.sum(-1)
        for rows in (self.keys, self.values):
            joined = same.expand(-1, self.heads, -1, -1) @ torch.where(moved[..., None] > 0, rows.pick(fold.victim), 0)
            mean = (torch.where(held[..., None] > 0, rows.pick(fold.target) * held[..., None], 0) + joined) / total.clamp_min(1)[..., None]
            rows.write(fold.target, mean)
        self.count = self.count.scatter(2, fold.target, total.to(self.count.dtype))
        self.count = self.count.masked_fill(torch.zeros_like(self.count, dtype=torch.bool).scatter(2, fold.victim, fold.done), 0)
        gained = torch.where(fold.done, torch.gather(self.usage, 2, fold.victim), 0)
        used = torch.gather(self.usage, 2, fold.target) + (alike @ gained[..., None])[..., 0]
        self.usage = self.usage.scatter(2, fold.target, used)
        cells = self.grid[0] * self.grid[1]
        place = self.frame * cells + self.cell  # the group stands where its newest member stood
        newest = torch.where(fold.done, torch.gather(place, 2, fold.victim), 0)
        place = place.scatter_reduce(2, fold.target, newest, "amax")
        self.frame, self.cell = place // cells, place % cells

    # -- changing -----------------------------------------------------------------------------------------------------

    def ingest(self, k: torch.Tensor, v: torch.Tensor, frame: int, usage: torch.Tensor, moment: QueryMoment | None,
               index: RowIndex | None = None, number: int = 0) -> Ingested:
        """Takes in one frame: k and v [B, H, S, D], usage [B, G, S]. Needs capacity >= S. ``index``: that of the commit, in which
        the frame has a ``number``."""
        index = index or self.open_index(moment, [k])
        score, match = self._match(number, index)
        fold = self._fold(score, index) if self.settings.folds else None
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
        went = Arrival.at(slot, before, joined)
        new_k, new_v = self._arriving(torch.cat([k, v], -1), went).chunk(2, -1)
        self.values.write(slot, self._joint(self.values, new_v, went))
        self._represent(k, new_k, went, newest)
        if self.settings.folds:
            self._note_nearest(index.tokens[number], score, match, slot, merged, index)
        self.correction = self.correction.masked_fill(opened, 0)
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

    def _arriving(self, rows: torch.Tensor, went: Arrival) -> torch.Tensor:
        """Mean [B, H, S, n] (float32) of the ``rows`` [B, H, S, n] that go where each token goes."""
        group = went.first.expand(-1, self.heads, -1)
        ones = torch.ones(group.shape, device=rows.device)
        mean, _ = registry.call("compact", self.search.backend, rows, ones, group, group.shape[-1], torch.float32)
        return mean[row_places(went.first, self.heads)]

    @staticmethod
    def _joint(held: MeanRows | PackedRows, mean: torch.Tensor, went: Arrival) -> torch.Tensor:
        """New running means of the rows that the tokens go to, weighted by multiplicity."""
        old = torch.where(went.before > 0, held.pick(went.slot), mean)
        return torch.lerp(mean, old, went.before / (went.before + went.joined))

    def _represent(self, k: torch.Tensor, mean: torch.Tensor, went: Arrival, newest: torch.Tensor) -> None:
        """Writes the keys that speak for the touched groups; ``mean``: that of the arriving keys."""
        if self.settings.representative == "mean":
            chosen = self._joint(self.keys, mean, went)
        else:
            chosen = k[row_places(torch.gather(newest, 2, went.slot), self.heads)].float()
        if self.mean is not None:
            chosen = self._closer_to_mean(self.mean, mean, chosen, went)
        self.keys.write(went.slot, chosen)

    def _closer_to_mean(self, means: MeanRows, mean: torch.Tensor, latest: torch.Tensor, went: Arrival) -> torch.Tensor:
        """The held medoid or the newest key, whichever is closer to the mean of all members."""
        mean = self._joint(means, mean, went)
        means.write(went.slot, mean)
        held = self.keys.pick(went.slot)
        closer = (latest - mean).square().sum(-1, keepdim=True) <= (held - mean).square().sum(-1, keepdim=True)
        return torch.where((went.before == 0) | closer, latest, held)

    def bias(self) -> torch.Tensor:
        """What attention adds to the logits of the rows, float32 [B, G, capacity]; -inf hides free rows."""
        return self.count.float().log() + self.correction

    def use(self, mass: torch.Tensor) -> None:
        """Updates the running usage of occupied rows with the attention mass [B, G, capacity] of a clean pass."""
        decay = self.settings.usage_decay
        self.usage = torch.where(self.count > 0, decay * self.usage + (1 - decay) * mass, self.usage)

    # -- undoing ------------------------------------------------------------------------------------------------------

    def _remember(self, slot: torch.Tensor) -> None:
        if self.undo is not None:
            self.undo.wide.append((slot, [rows.raw(slot) for rows in self._wide()]))

    def begin_undo(self) -> None:
        """From here on, what changes is remembered, until the next call."""
        self.undo = _Undo(self._narrow())

    def roll_back(self) -> None:
        """Restores the state at begin_undo(), bit for bit."""
        assert self.undo is not None
        for slot, parts in reversed(self.undo.wide):
            for rows, saved in zip(self._wide(), parts):
                rows.restore(slot, saved)
        (self.count, self.frame, self.cell, self.usage, self.correction, self.near_row, self.near_score,
         self.last_slots) = self.undo.narrow
        self.undo = None
