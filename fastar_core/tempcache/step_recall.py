"""How much attention a compaction moved: the same queries over the store before and after it.

Per query, every group counts: P_g = mass its members had before (rows of tokens that joined it included), p_g = mass of its
representative with its bias afterwards; rows that lost their place form one group with p = 0. Recall = 1 - 1/2 sum |P_g - p_g|.
The masses of the same pass also tell how much each row is used, and what a group's bias must be for its representative to get
what its members got: a mean key alone gets less (the exponential of a mean is below the mean of exponentials).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .pool import HistoryPool, Ingested
from .regroup import Fold

ROWS_AT_ONCE = 8192
FINENESS = 1024  # corrections are multiples of one part of this: sums in another order must not become other decisions
NOTHING = 1e-12  # mean mass below which a row says nothing about its bias


class StepRecall:
    """Attention of a few queries over [pinned | history | own], followed through one commit of one layer.

    q [B, H, Q, D] and keys [B, H, n, D] as the call rotated them, bias [B, G, n]; ``bound`` history rows stand behind
    ``pinned_rows`` pinned ones. Only rows that the commit changes are looked at again.
    """

    def __init__(self, q: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None, pinned_rows: int, bound: int,
                 pool: HistoryPool) -> None:
        self._pool = pool
        self._q = q.float() * q.shape[-1] ** -0.5
        parts = [self._q @ part.float().transpose(-1, -2) for part in keys.split(ROWS_AT_ONCE, 2)]
        scores = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
        if bias is not None:
            scores += bias[:, :, None]
        self._mass = scores.softmax(-1)
        self._lse = (scores.amax(-1) - self._mass.amax(-1).log())[..., None]
        self.own_start = pinned_rows + bound
        history = self._mass[..., pinned_rows:self.own_start]
        self._history = torch.nn.functional.pad(history, (0, pool.capacity - bound))
        self._lost = torch.zeros_like(self._mass[..., 0])
        self._changed: list[torch.Tensor] = []

    def _grouped(self, mass: torch.Tensor) -> torch.Tensor:
        mean = mass.mean(2)
        return mean.mean(1, keepdim=True) if self._pool.groups == 1 else mean

    def _wide(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [B, G, N] as a gather index [B, H, Q, N]."""
        return rows[:, :, None].expand(*self._mass.shape[:3], -1)

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
        slot = self._wide(went.slot)
        held = torch.gather(self._history, 3, slot)
        opened = ~went.merged[:, :, None]
        self._lost = self._lost + (held * opened).sum(-1)  # rows without members held nothing
        self._history.scatter_(3, slot, torch.where(opened, 0, held))
        self._history.scatter_add_(3, slot, self._columns(span, own))
        self._changed.append(went.slot)

    def _fold(self, fold: Fold) -> None:
        """Groups that joined others took their mass with them."""
        victim, target = self._wide(fold.victim), self._wide(fold.target)
        held = torch.gather(self._history, 3, victim)
        moved = held * fold.done[:, :, None]
        self._history.scatter_add_(3, target, moved)
        self._history.scatter_(3, victim, held - moved)
        self._changed.append(fold.target)

    def _correct(self, rows: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
        """Sets the corrections of the changed ``rows`` [B, G, N]: ``before`` [B, G, N] = mean mass of their members, ``after``
        = that of their representatives with a bias of 0. Rows that the queries hardly see keep theirs."""
        pool, most = self._pool, self._pool.settings.bias_correction
        least = 0.0 if pool.settings.representative == "mean" else -most
        count = torch.gather(pool.count, 2, rows).clamp_min(1)
        seen = (before > NOTHING) & (after > NOTHING)
        wanted = before.clamp_min(NOTHING).log() - after.clamp_min(NOTHING).log() - count.log()
        wanted = (wanted * FINENESS).round() / FINENESS
        wanted = torch.where(seen, wanted.clamp(least, most), torch.gather(pool.correction, 2, rows))
        pool.correction = pool.correction.scatter(2, rows, torch.where(count > 1, wanted, 0))

    def finish(self, turned: Callable[[torch.Tensor], torch.Tensor], kept: torch.Tensor) -> torch.Tensor:
        """Recall (a scalar), after the corrections of the changed rows are set. ``turned`` reads the keys [B, H, N, D] of history
        rows [B, G, N] after the commit, turned as those before it; ``kept`` [pinned rows] says where each pinned row stood."""
        pinned = self._mass[..., kept].sum(-1)
        same = pinned + self._history.sum(-1)  # mass of what is as it was; without the changed rows, below
        total, moved = same, self._lost
        if self._changed:
            rows = torch.cat(self._changed, -1)
            wide = self._wide(rows)
            alone = (self._q @ turned(rows).float().transpose(-1, -2) - self._lse).exp_()
            held = torch.gather(self._history, 3, wide)
            self._correct(rows, self._grouped(held), self._grouped(alone))
            shown = alone * torch.gather(self._pool.bias(), 2, rows)[:, :, None].exp()
            once = self._once(rows)
            same = same - (held * once).sum(-1)
            total = same + (shown * once).sum(-1)
            moved = moved + ((held - shown / total[..., None]).abs() * once).sum(-1)
        return (1 - (moved + same * (1 - 1 / total).abs()) / 2).mean()

    def _once(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, G, 1, N] weights under which a row that is listed several times counts once."""
        times = torch.zeros_like(self._pool.usage).scatter_add(2, rows, torch.ones(rows.shape, device=rows.device))
        return 1 / torch.gather(times, 2, rows)[:, :, None]
