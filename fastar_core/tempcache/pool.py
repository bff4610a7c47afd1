"""The groups of one layer in a fixed number of rows: representative key, mean value, multiplicity, position, usage.

A row is free while its multiplicity is 0. Everything is chosen by top-k and masks of fixed size: no loop over tokens, no read
by the host. A frame that leaves the recent range is taken in as a whole (`ingest`): tokens join groups, the rest take free rows
or those of the least used groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .features import QueryMoment, features
from .matching import NO_MATCH, Search, local_best, neighbour_mask
from .settings import TempCacheSettings

PROTECTED = float("inf")


@dataclass
class Ingested:
    """Where the tokens of one frame went: slot [B, G, S], merged [B, G, S] (False = opened a group), similarity [B, G, S]."""

    slot: torch.Tensor
    merged: torch.Tensor
    similarity: torch.Tensor


def per_head(index: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """Row index [B, G, N] as a gather index [B, H, N, D]."""
    return index.expand(-1, heads, -1)[..., None].expand(-1, -1, -1, dim)


class HistoryPool:
    """``capacity`` rows per head of one layer. ``groups`` G is 1 when heads share decisions, else the number of heads."""

    def __init__(self, capacity: int, rows: int, cols: int, settings: TempCacheSettings, like: torch.Tensor) -> None:
        batch, heads, _, dim = like.shape
        self.capacity = capacity
        self.settings = settings
        self.heads = heads
        self.groups = 1 if settings.shared else heads
        self.k = like.new_zeros((batch, heads, capacity, dim))
        self.v = torch.zeros((batch, heads, capacity, dim), dtype=torch.float32, device=like.device)
        self.count = torch.zeros((batch, self.groups, capacity), dtype=torch.int32, device=like.device)
        self.frame = torch.zeros((batch, self.groups, capacity), dtype=torch.int64, device=like.device)
        self.cell = torch.zeros_like(self.frame)
        self.usage = torch.zeros((batch, self.groups, capacity), dtype=torch.float32, device=like.device)
        self.last_slots = torch.full((batch, self.groups, rows * cols), -1, dtype=torch.int64, device=like.device)
        self.mean_key = torch.zeros_like(self.v) if settings.representative != "last" else None
        self.near = neighbour_mask(rows, cols, settings.neighbourhood).to(like.device)
        self.search = Search(settings)
        self.undo: list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Everything that makes up the state, in a fixed order (for bytes, copies and digests)."""
        held = [self.k, self.v, self.count, self.frame, self.cell, self.usage, self.last_slots]
        return held if self.mean_key is None else [*held, self.mean_key]

    def bytes(self) -> int:
        """Bytes of the state and of what a roll-back would restore."""
        kept = [t for index, wide, narrow in self.undo or [] for t in (*wide, *narrow)]
        return sum(t.numel() * t.element_size() for t in [*self.tensors(), *kept])

    def clear(self) -> None:
        """Frees every row; the memory is kept."""
        self.count.zero_()
        self.usage.zero_()
        self.last_slots.fill_(-1)
        self.undo = None

    # -- choosing -----------------------------------------------------------------------------------------------------

    def _match(self, k: torch.Tensor, moment: QueryMoment | None) -> tuple[torch.Tensor, torch.Tensor]:
        settings = self.settings
        logit = settings.similarity == "logit"
        tokens = features(k, moment, settings.shared)
        pool = features(self.k, moment, settings.shared)
        near_score, near_slot = local_best(tokens, pool, self.last_slots, self.near, logit)
        far_score, far_slot = self.search.best(tokens, pool, self.count > 0)
        use_near = (near_score >= settings.threshold) | (near_score >= far_score)
        return torch.where(use_near, near_score, far_score), torch.where(use_near, near_slot, far_slot)

    def _who_merges(self, score: torch.Tensor) -> torch.Tensor:
        """By the threshold; beyond that, as many of the best matches above the floor as free rows are lacking."""
        free = (self.count == 0).sum(-1, keepdim=True)
        rank = score.argsort(dim=-1, descending=True).argsort(dim=-1)
        needed = rank < (score.shape[-1] - free)
        if self.settings.threshold > 1:
            return torch.zeros_like(needed)
        return (score > NO_MATCH) & ((score >= self.settings.threshold) | (needed & (score >= self.settings.floor)))

    def _slots(self, merged: torch.Tensor, match: torch.Tensor) -> torch.Tensor:
        """Slots of all tokens: the match, or the next free or least used row that nobody joins."""
        free = torch.arange(-self.capacity, 0, device=self.usage.device, dtype=self.usage.dtype)
        usage = torch.where(self.count == 0, free, self.usage)  # free rows first, the lowest first: occupied rows stay in front
        taken = torch.zeros_like(usage).scatter_add(2, match, merged.float())
        usage = usage.masked_fill(taken > 0, PROTECTED)
        order = usage.topk(min(self.capacity, match.shape[-1]), dim=-1, largest=False, sorted=True).indices
        rank = ((~merged).cumsum(-1) - 1).clamp(0, order.shape[-1] - 1)
        return torch.where(merged, match, torch.gather(order, 2, rank))

    # -- undoing ------------------------------------------------------------------------------------------------------

    def _remember(self, slot: torch.Tensor) -> None:
        if self.undo is None:
            return
        index = per_head(slot, self.heads, self.k.shape[-1])
        wide = [t for t in (self.k, self.v, self.mean_key) if t is not None]
        narrow = [self.count, self.frame, self.cell, self.usage, self.last_slots]
        self.undo.append((index, [torch.gather(t, 2, index) for t in wide], [t.clone() for t in narrow]))

    def begin_undo(self) -> None:
        """From here on, what changes is remembered, until the next call."""
        self.undo = []

    def roll_back(self) -> None:
        """Restores the state at begin_undo()."""
        for index, wide, narrow in reversed(self.undo or []):
            held = [t for t in (self.k, self.v, self.mean_key) if t is not None]
            for tensor, rows in zip(held, wide):
                tensor.scatter_(2, index, rows)
            self.count, self.frame, self.cell, self.usage, self.last_slots = narrow
        self.undo = None

    # -- changing -----------------------------------------------------------------------------------------------------

    def ingest(self, k: torch.Tensor, v: torch.Tensor, frame: int, usage: torch.Tensor,
               moment: QueryMoment | None) -> Ingested:
        """Takes in one frame: k (before RoPE) and v [B, H, S, D], usage [B, G, S]. Needs capacity >= S."""
        score, match = self._match(k, moment)
        merged = self._who_merges(score)
        slot = self._slots(merged, match)
        self._remember(slot)
        opened = torch.zeros_like(self.count).scatter_add(2, slot, (~merged).int()) > 0
        before = torch.where(opened, torch.zeros_like(self.count), self.count)
        joined = torch.zeros_like(self.count).scatter_add(2, slot, torch.ones_like(slot, dtype=torch.int32))
        self.count = before + joined
        self.v = self._mean(self.v, v, slot, before)
        self._represent(k, slot, before, opened)
        newest = self._newest(slot)
        touched = joined > 0
        self.frame = torch.where(touched, torch.full_like(self.frame, frame), self.frame)
        self.cell = torch.where(touched, newest, self.cell)
        mine = torch.gather(usage, 2, newest.clamp_max(usage.shape[-1] - 1))
        self.usage = torch.where(touched, torch.where(opened, mine, torch.maximum(mine, self.usage)), self.usage)
        self.last_slots = slot
        return Ingested(slot, merged, score)

    def _newest(self, slot: torch.Tensor) -> torch.Tensor:
        """Highest token number that went to each row [B, G, capacity] (0 where none did)."""
        tokens = torch.arange(slot.shape[-1], device=slot.device).expand_as(slot)
        return torch.zeros_like(self.cell).scatter_reduce(2, slot, tokens, "amax")

    def _mean(self, held: torch.Tensor, new: torch.Tensor, slot: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Running mean per row in float32, weighted by multiplicity; tokens are added in their own order."""
        weight = before.expand(-1, self.heads, -1)[..., None].float()
        index = per_head(slot, self.heads, new.shape[-1])
        total = (held * weight).scatter_add(2, index, new.float())
        count = self.count.expand(-1, self.heads, -1)[..., None].clamp_min(1)
        return torch.where(self.count.expand(-1, self.heads, -1)[..., None] > before.expand(-1, self.heads, -1)[..., None],
                           total / count, held)

    def _represent(self, k: torch.Tensor, slot: torch.Tensor, before: torch.Tensor, opened: torch.Tensor) -> None:
        newest = per_head(self._newest(slot), self.heads, k.shape[-1])
        latest = torch.gather(k, 2, newest)
        touched = (self.count > before).expand(-1, self.heads, -1)[..., None]
        if self.mean_key is None:
            self.k = torch.where(touched, latest, self.k)
            return
        self.mean_key = self._mean(self.mean_key, k, slot, before)
        if self.settings.representative == "mean":
            self.k = torch.where(touched, self.mean_key.to(k.dtype), self.k)
            return
        old = (self.k.float() - self.mean_key).square().sum(-1, keepdim=True)
        new = (latest.float() - self.mean_key).square().sum(-1, keepdim=True)
        fresh = opened.expand(-1, self.heads, -1)[..., None]
        self.k = torch.where(touched & (fresh | (new <= old)), latest, self.k)

    def use(self, mass: torch.Tensor) -> None:
        """Updates the running usage of occupied rows with the attention mass [B, G, capacity] of a clean pass."""
        decay = self.settings.usage_decay
        self.usage = torch.where(self.count > 0, decay * self.usage + (1 - decay) * mass, self.usage)
