"""How much attention a compaction moved: the same queries over the store before and after it.

Per query, every group counts: P_g = mass its members had before (rows of tokens that joined it included), p_g = mass of its
representative with its bias afterwards; rows that lost their place form one group with p = 0. Recall = 1 - 1/2 sum |P_g - p_g|.
The masses of the same pass also tell how much each row is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .pool import HistoryPool, Ingested
from .regroup import Fold


class StepRecall:
    """Attention of a few queries over [pinned | history | own], followed through one commit of one layer.

    q [B, H, Q, D] and keys [B, H, n, D] as the call rotated them, bias [B, G, n]; ``bound`` history rows stand behind
    ``pinned_rows`` pinned ones.
    """

    def __init__(self, q: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None, pinned_rows: int, bound: int,
                 pool: HistoryPool) -> None:
        self._q = q.float()
        self._mass = _masses(self._q, (keys,), bias)
        self.own_start = pinned_rows + bound
        history = self._mass[..., pinned_rows:self.own_start]
        self._history = torch.nn.functional.pad(history, (0, pool.capacity - bound))
        self._lost = torch.zeros_like(self._mass[..., 0])
        self._shared = pool.groups == 1

    def _grouped(self, mass: torch.Tensor) -> torch.Tensor:
        mean = mass.mean(2)
        return mean.mean(1, keepdim=True) if self._shared else mean

    def history_mass(self) -> torch.Tensor:
        """Mean mass [B, G, capacity] of every history row."""
        return self._grouped(self._history)

    def _columns(self, span: slice, own: bool) -> torch.Tensor:
        offset = self.own_start if own else 0
        return self._mass[..., offset + span.start:offset + span.stop]

    def mass_of(self, span: slice, own: bool) -> torch.Tensor:
        """Mean mass [B, G, S] of a frame among the pinned rows, or among the call's own."""
        return self._grouped(self._columns(span, own))

    def follow(self, span: slice, own: bool, went: Ingested) -> None:
        """A frame was taken in: its mass now belongs to the groups it went to; opened rows lost what they held."""
        if went.fold is not None:
            self._fold(went.fold)
        opened = went.opened[:, :, None].float()
        self._lost = self._lost + (self._history * went.evicted[:, :, None]).sum(-1)
        moved = self._columns(span, own)
        index = went.slot[:, :, None].expand_as(moved)
        self._history = (self._history * (1 - opened)).scatter_add(-1, index, moved)

    def _fold(self, fold: Fold) -> None:
        """Groups that joined others took their mass with them."""
        victim, target = (rows[:, :, None].expand(*self._history.shape[:3], -1) for rows in (fold.victim, fold.target))
        moved = torch.gather(self._history, 3, victim) * fold.done[:, :, None]
        self._history = self._history.scatter_add(3, target, moved).scatter_add(3, victim, -moved)

    def finish(self, keys: Sequence[torch.Tensor], bias: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Recall (a scalar). ``keys``: parts of [pinned | all history rows] after the commit, turned as those before it, with
        their bias; ``kept`` [pinned rows] says where each pinned row stood before."""
        after = _masses(self._q, keys, bias)
        pinned = len(kept)
        change = (self._mass[..., kept] - after[..., :pinned]).abs().sum(-1)
        change = change + (self._history - after[..., pinned:]).abs().sum(-1) + self._lost
        return (1 - change / 2).mean()


def _masses(q: torch.Tensor, keys: Sequence[torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
    scores = torch.cat([q @ part.float().transpose(-1, -2) for part in keys], -1) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias[:, :, None]
    return scores.softmax(-1)
