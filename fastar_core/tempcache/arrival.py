"""Where the tokens of one frame go: what their rows held before, and which tokens share a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Arrival:
    """Rows that tokens go to [B, G, S], and per token: members the row had and gets, float32 [B, G, S, 1], and the first token
    that goes to the same row [B, G, S]."""

    slot: torch.Tensor
    before: torch.Tensor
    joined: torch.Tensor
    first: torch.Tensor

    @classmethod
    def at(cls, slot: torch.Tensor, before: torch.Tensor, joined: torch.Tensor) -> Arrival:
        """before, joined [B, G, capacity]: members the rows keep, and tokens that come."""
        tokens = torch.arange(slot.shape[-1], device=slot.device).expand_as(slot)
        first = torch.full_like(before, slot.shape[-1], dtype=torch.int64).scatter_reduce(2, slot, tokens, "amin")
        held, new = (torch.gather(count, 2, slot)[..., None].float() for count in (before, joined))
        return cls(slot, held, new, torch.gather(first, 2, slot))
