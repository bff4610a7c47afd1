"""Makes room in a full pool: little used groups join the group nearest to them, so that what is new needs no poor match.

Without this a full pool has two bad choices for a token that resembles nothing: to blur the best match there is, or to drop a
group. Whichever of the two unions costs less is made: the token with its match, or a little used group with its neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .matching import NO_MATCH


@dataclass(frozen=True)
class Fold:
    """Rows that went into others: victim and target rows [B, G, n], done [B, G, n] (False = nothing happened)."""

    victim: torch.Tensor
    target: torch.Tensor
    done: torch.Tensor

    def remap(self, rows: torch.Tensor, capacity: int) -> torch.Tensor:
        """Where rows [B, G, N] stand now."""
        table = torch.arange(capacity, device=rows.device).expand(*self.victim.shape[:2], capacity)
        table = table.scatter(2, self.victim, torch.where(self.done, self.target, self.victim))
        return torch.gather(table, 2, rows)


def fold_rows(tokens: int, capacity: int) -> int:
    """How many little used rows are considered per frame."""
    return min(-(-tokens // 2), capacity // 2)


def least_used(usage: torch.Tensor, count: torch.Tensor, number: int) -> torch.Tensor:
    """The ``number`` occupied rows [B, G, number] with the lowest usage; ties go to the lower row on every device."""
    return usage.masked_fill(count == 0, float("inf")).argsort(dim=-1, stable=True)[..., :number]


def choose_folds(score: torch.Tensor, victim: torch.Tensor, target: torch.Tensor, likeness: torch.Tensor, free: torch.Tensor,
                 threshold: float, floor: float) -> Fold:
    """Pairs the likeliest victims with the tokens that fit worst, beyond those that free rows take.

    score [B, G, S] of the tokens; likeness [B, G, V] of victims to their targets; free [B, G, 1] free rows.
    """
    worst = score.sort(dim=-1).values
    lacking = (score < threshold).sum(-1, keepdim=True) - free
    order = likeness.argsort(dim=-1, descending=True, stable=True)
    victim, target, likeness = (torch.gather(t, 2, order) for t in (victim, target, likeness))
    place = torch.arange(victim.shape[-1], device=score.device)
    against = torch.gather(worst, 2, (place + free).clamp_max(score.shape[-1] - 1))
    done = (place < lacking) & (likeness > against) & (likeness >= floor) & (likeness > NO_MATCH)
    return Fold(victim, target, done)
