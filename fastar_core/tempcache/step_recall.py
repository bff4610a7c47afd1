"""How much attention a compaction moved: the same queries over the store before and after it.

Per query, every group counts: P_g = mass its members had before (rows of tokens that joined it included), p_g = mass of its
representative with its bias afterwards; rows that lost their place form one group with p = 0. Recall = 1 - 1/2 sum |P_g - p_g|.
The masses of the same pass also tell how much each row is used.
"""

from __future__ import annotations

import torch

from .pool import HistoryPool, Ingested


class StepRecall:
    """Attention of a few queries [B, H, Q, rows] over [pinned | history | own], followed through one commit."""

    def __init__(self) -> None:
        self._q: torch.Tensor | None = None
        self._mass: torch.Tensor | None = None
        self._lost: torch.Tensor | None = None
        self._history: torch.Tensor | None = None
        self._pinned = self._own = 0
        self.value: torch.Tensor | None = None

    @property
    def measured(self) -> bool:
        """True between a measured pass and the end of its commit."""
        return self._q is not None

    @property
    def own_start(self) -> int:
        """First of the call's own rows in the measured pass."""
        return self._own

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self._q, self._mass, self._history) if t is not None]

    def measure(self, q: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None) -> None:
        """q [B, H, Q, D] rotated as the call's, keys [B, H, n, D]."""
        self._q = q.float()
        self._mass = _masses(self._q, keys, bias)

    def begin(self, pinned_rows: int, bound: int, pool: HistoryPool) -> None:
        """The commit starts; rows of the measured pass are pinned, then ``bound`` of history, then own."""
        assert self._mass is not None
        self._pinned, self._own = pinned_rows, pinned_rows + bound
        history = self._mass[..., pinned_rows:self._own]
        self._history = torch.nn.functional.pad(history, (0, pool.capacity - bound))
        self._lost = torch.zeros_like(self._mass[..., 0])

    def _grouped(self, mass: torch.Tensor, pool: HistoryPool) -> torch.Tensor:
        mean = mass.mean(2)
        return mean.mean(1, keepdim=True) if pool.groups == 1 else mean

    def history_mass(self, pool: HistoryPool) -> torch.Tensor:
        """Mean mass [B, G, capacity] of every history row."""
        assert self._history is not None
        return self._grouped(self._history, pool)

    def _columns(self, span: slice, own: bool) -> torch.Tensor:
        assert self._mass is not None
        offset = self._own if own else 0
        return self._mass[..., offset + span.start:offset + span.stop]

    def mass_of(self, span: slice, own: bool, pool: HistoryPool) -> torch.Tensor:
        """Mean mass [B, G, S] of a frame among the pinned rows, or among the call's own."""
        return self._grouped(self._columns(span, own), pool)

    def follow(self, span: slice, own: bool, went: Ingested) -> None:
        """A frame was taken in: its mass now belongs to the groups it went to; opened rows lost what they held."""
        assert self._history is not None and self._lost is not None
        opened = went.opened[:, :, None].float()
        self._lost = self._lost + (self._history * went.evicted[:, :, None]).sum(-1)
        moved = self._columns(span, own)
        index = went.slot[:, :, None].expand_as(moved)
        self._history = (self._history * (1 - opened)).scatter_add(-1, index, moved)

    def finish(self, keys: torch.Tensor, bias: torch.Tensor | None, kept: torch.Tensor, bound: int) -> None:
        """After the commit: keys and bias of [pinned | history]; ``kept`` [pinned rows] says where each pinned row stood in the
        measured pass."""
        if self._q is None or self._mass is None or self._history is None or self._lost is None:
            return
        after = _masses(self._q, keys, bias)
        pinned = after.shape[-1] - bound
        change = (self._mass[..., kept] - after[..., :pinned]).abs().sum(-1)
        change = change + (self._history[..., :bound] - after[..., pinned:]).abs().sum(-1) + self._lost
        self.value = (1 - change / 2).mean()
        self._q = self._mass = self._history = self._lost = None


def _masses(q: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    scores = q @ keys.float().transpose(-1, -2) / q.shape[-1] ** 0.5
    if bias is not None:
        scores = scores + bias[:, :, None]
    return scores.softmax(-1)
