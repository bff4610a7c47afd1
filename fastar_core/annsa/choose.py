"""Which key buckets each query bucket visits: those that promise most attention mass per key, until the pairs are spent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .buckets import every
from .key_buffer import KeyBuffer

SAMPLED_QUERIES = 256
SAMPLED_KEYS = 2048


@dataclass
class Offers:
    """One call's (query bucket, key bucket) pairs, float32 [B, H, C, K]: ``gain`` mass per key and query, ``cost`` pairs to visit.
    ``budget``: pairs there are to spend [B]."""

    gain: torch.Tensor
    cost: torch.Tensor
    budget: torch.Tensor


def expected_mass(q: torch.Tensor, codes: torch.Tensor, centres: torch.Tensor, buffer: KeyBuffer) -> torch.Tensor:
    """Attention mass [B, H, C, K] a query of each bucket is expected to have in each key bucket, the always visible keys taking
    their share. q [B, H, N, D], codes int32 [B, H, N], centres [B, H, C, D] float32; a sample of the queries and the centres vote."""
    chosen = every(q.shape[2], SAMPLED_QUERIES, q.device)
    count, scale = centres.shape[2], q.shape[-1] ** -0.5
    voters = torch.cat([q[:, :, chosen].float(), centres], 2)
    own = torch.arange(count, device=q.device, dtype=codes.dtype).expand(*codes.shape[:2], -1)
    votes = torch.cat([codes[:, :, chosen], own], 2).long()
    always = buffer.always_keys()
    seen = every(always.shape[2], SAMPLED_KEYS, q.device) if always.shape[2] else chosen[:0]
    parts = [voters @ buffer.means.transpose(2, 3) * scale + buffer.log_weight[:, :, None]]
    if len(seen):
        near = (voters @ always[:, :, seen].float().transpose(2, 3) * scale).logsumexp(-1, keepdim=True)
        parts.append(near + math.log(always.shape[2] / len(seen)))
    mass = torch.cat(parts, -1).softmax(-1)[..., :buffer.means.shape[2]].nan_to_num(0.0)
    total = mass.new_zeros((*mass.shape[:2], count, mass.shape[-1])).scatter_add(2, votes[..., None].expand_as(mass), mass)
    voted = mass.new_zeros((*mass.shape[:2], count)).scatter_add(2, votes, torch.ones_like(votes, dtype=mass.dtype))
    return total / voted.clamp_min(1)[..., None]


def make_offers(mass: torch.Tensor, query_counts: torch.Tensor, buffer: KeyBuffer, density: float, must: torch.Tensor | None) -> Offers:
    """``query_counts`` int32 [B, H, C]; ``must`` bool [B, H, C, K]: pairs taken before all others."""
    keys = (buffer.offsets[..., 1:] - buffer.offsets[..., :-1]).float()[:, :, None]
    queries = query_counts.float()[..., None]
    gain = torch.where(keys > 0, mass / keys.clamp_min(1), -1.0)
    if must is not None:
        gain = gain.masked_fill(must & (keys > 0), torch.inf)
    rows = query_counts.sum((1, 2)).double()
    budget = rows * (density * buffer.rows - buffer.always - buffer.own)
    return Offers(gain, queries * keys, budget.clamp_min(0))


def take_best(gain: torch.Tensor, cost: torch.Tensor, budget: torch.Tensor) -> torch.Tensor:
    """bool: the offers with the highest gain whose summed cost stays within budget; gain, cost [G, n], budget [G].

    What the first offer that is too large leaves over goes, once, to smaller ones behind it.
    """
    order = gain.argsort(dim=-1, descending=True, stable=True)
    price = torch.gather(cost, 1, order).double()
    limit = budget[:, None] * (1 + 1e-9)
    taken = price.cumsum(-1) <= limit
    rest = limit - (price * taken).sum(-1, keepdim=True)
    small = ~taken & (price <= rest)
    taken = taken | (small & ((price * small).cumsum(-1) <= rest))
    return torch.zeros_like(taken).scatter(1, order, taken)


def choose(offers: Offers, share: torch.Tensor | None) -> torch.Tensor:
    """bool [B, H, C, K]: the best offers within the call's budget, or ``share`` times that (scalar)."""
    budget = offers.budget if share is None else offers.budget * share
    return take_best(offers.gain.flatten(1), offers.cost.flatten(1), budget).view_as(offers.gain)


def balanced_shares(offers: list[Offers]) -> list[torch.Tensor]:
    """What part of its own budget each call should spend so that all together take the best offers there are: scalars.

    Shares of the last block serve the next one. A threshold on the gain would do the same, but spends too much or too little as soon
    as the picture changes.
    """
    gain = torch.cat([o.gain.flatten() for o in offers])
    cost = torch.cat([o.cost.flatten() for o in offers])
    own = torch.stack([o.budget.sum() for o in offers])
    taken = take_best(gain[None], cost[None], own.sum()[None])[0]
    spent = torch.stack([part.sum() for part in (cost.double() * taken).split([o.gain.numel() for o in offers])])
    whole = own.sum() / spent.sum().clamp_min(1)
    return [torch.where(mine > 0, part * whole / mine.clamp_min(1), 1.0) for part, mine in zip(spent, own)]


def key_ranges(chosen: torch.Tensor, buffer: KeyBuffer) -> torch.Tensor:
    """int32 [B, H, C, K + 2, 2]: row ranges of the chosen buckets (empty for the others), of the always visible and the own rows."""
    low = buffer.offsets[:, :, None, :-1].expand(chosen.shape)
    high = torch.where(chosen, buffer.offsets[:, :, None, 1:], low)
    ranges = torch.stack([low, high], -1)
    edges = torch.tensor([[0, buffer.always], [buffer.rows - buffer.own, buffer.rows]], dtype=torch.int32, device=chosen.device)
    return torch.cat([ranges, edges.expand(*chosen.shape[:3], 2, 2)], 3)
