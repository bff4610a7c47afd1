"""Makes room in a full pool: groups that are nearly alike join, so that what is new needs no poor match.

Without this a full pool has two bad choices for a token that resembles nothing: to blur the best match there is, or to drop a
group. Whichever of the two unions costs less is made: the token with its match, or a group with the group nearest to it.

Every group remembers the row it resembled most when it was opened. Of the two rows of any close pair, one was opened later and
found the other (or something closer still) then, so the closest pairs of the pool are known without another search.
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
    """How many pairs are considered per frame."""
    return min(-(-tokens // 4), capacity // 2)


def highest(values: torch.Tensor, number: int) -> torch.Tensor:
    """Places [..., number] of the highest of float32 ``values`` [..., M], the highest first.

    Ties go to the lower place on every device: the numbers are ranked as integers that carry their place.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0: one kind of zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    rows = values.shape[-1]
    place = torch.arange(rows - 1, -1, -1, device=values.device)
    return (ordered * rows + place).topk(number, dim=-1).indices


def closest_pairs(near_row: torch.Tensor, near_score: torch.Tensor, count: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``number`` rows [B, G, number] that were most like another when opened, and that other row.

    near_row, near_score, count [B, G, capacity]. Ties go to the lower row on every device.
    """
    own = torch.arange(count.shape[-1], device=count.device)
    gone = (count == 0) | (near_row == own) | (torch.gather(count, 2, near_row) == 0)
    victim = highest(near_score.masked_fill(gone, NO_MATCH), number)
    return victim, torch.gather(near_row, 2, victim)


def choose_folds(score: torch.Tensor, victim: torch.Tensor, target: torch.Tensor, likeness: torch.Tensor, free: torch.Tensor,
                 threshold: float, floor: float) -> Fold:
    """Sets the likeliest pairs against the tokens that fit worst, beyond those that free rows take.

    score [B, G, S] of the tokens; likeness [B, G, V] of victims to their targets; free [B, G, 1] free rows. A row takes part in
    one direction only: of two pairs where one's target is the other's victim, the likelier one is made.
    """
    worst = score.sort(dim=-1).values
    lacking = (score < threshold).sum(-1, keepdim=True) - free
    order = likeness.argsort(dim=-1, descending=True, stable=True)
    victim, target, likeness = (torch.gather(t, 2, order) for t in (victim, target, likeness))
    chained = target[..., :, None] == victim[..., None, :]
    able = ~(chained.tril(-1).any(-1) | chained.triu(1).any(-2)) & (likeness >= floor) & (likeness > NO_MATCH)
    place = able.cumsum(-1) - 1
    against = torch.gather(worst, 2, (place + free).clamp(0, score.shape[-1] - 1))
    return Fold(victim, target, able & (place < lacking) & (likeness > against))
