"""Equal rows of a conditioning. A cross-attention maps rows one by one, so equal rows have equal keys and values in every layer,
and softmax over n equal keys is softmax over one key with log n added to its logit: nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass

import torch

HIDDEN = -torch.inf
SAME = 2e-2
"""Relative; half precision computes equal rows a little differently."""


@dataclass(frozen=True)
class RowGroups:
    """``index`` int64 [B, M]: first row of each group, ascending; ``log_count`` float32 [B, M]: log of the rows in it, -inf = filler
    (batch rows have different numbers of groups); ``padding`` int64 [B]: place of the largest group of several rows, -1 = none;
    ``twin`` int64 [B]: its last row (0 = none)."""

    index: torch.Tensor
    log_count: torch.Tensor
    padding: torch.Tensor
    twin: torch.Tensor
    rows: int

    @property
    def merges(self) -> bool:
        """Whether any two rows are equal."""
        return self.index.shape[1] < self.rows or bool(self.padding.max() >= 0)

    def true_for(self, k: torch.Tensor) -> bool:
        """Whether keys k [B, L, H, D] of the padding's first and last row agree, as they must when the keys come from these rows."""
        first = torch.gather(self.index, 1, self.padding.clamp_min(0)[:, None])[:, 0]
        batch = torch.arange(k.shape[0], device=k.device)
        one, other = k[batch, torch.where(self.padding >= 0, first, self.twin)].float(), k[batch, self.twin].float()
        return bool((one - other).norm() <= SAME * one.norm().clamp_min(1e-12))


def _one(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First row, last row and size of each group of equal rows of [L, C], in the order of the first rows."""
    _, group, count = torch.unique(rows, dim=0, return_inverse=True, return_counts=True)
    place = torch.arange(len(rows), device=rows.device)
    first = torch.full_like(count, len(rows)).scatter_reduce(0, group, place, "amin")
    last = torch.zeros_like(count).scatter_reduce(0, group, place, "amax")
    order = first.argsort()
    return first[order], last[order], count[order]


def find_groups(context: torch.Tensor) -> RowGroups:
    """Groups of equal rows of context [B, L, C]. Reads values on the host: once per conditioning entry, not per call."""
    found = [_one(rows) for rows in context]
    size = max((len(first) for first, _, _ in found), default=0)
    index = torch.zeros((len(found), size), dtype=torch.int64, device=context.device)
    log_count = torch.full((len(found), size), HIDDEN, device=context.device)
    padding = torch.full((len(found),), -1, dtype=torch.int64, device=context.device)
    twin = torch.zeros_like(padding)
    for row, (first, last, count) in enumerate(found):
        index[row, :len(first)] = first
        log_count[row, :len(first)] = count.float().log()
        if len(count) and count.max() > 1:
            padding[row] = count.argmax()
            twin[row] = last[padding[row]]
    return RowGroups(index, log_count, padding, twin, context.shape[1])


def joined(parts: list[RowGroups]) -> RowGroups:
    """Groups of several batches one after the other; shorter ones get fillers."""
    if len(parts) == 1:
        return parts[0]
    size = max(part.index.shape[1] for part in parts)

    def wide(tensor: torch.Tensor, fill: float) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, size - tensor.shape[1]), value=fill)

    return RowGroups(torch.cat([wide(p.index, 0) for p in parts]), torch.cat([wide(p.log_count, HIDDEN) for p in parts]),
                     torch.cat([p.padding for p in parts]), torch.cat([p.twin for p in parts]), parts[0].rows)
