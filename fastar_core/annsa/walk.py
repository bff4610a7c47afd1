"""One sparse attention over a bucket-sorted buffer: group the queries, choose buckets, walk their ranges."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels import registry
from ...kernels.tiles import TileTable, good_tile_rows
from .choose import Offers, choose, expected_mass, key_ranges, make_offers
from .key_buffer import KeyBuffer

RECALL_QUERIES = 64


@dataclass
class Queries:
    """q [B, N, H, D] with codes int32 [B, H, N] and the float32 centre of each bucket [B, H, C, D]."""

    q: torch.Tensor
    codes: torch.Tensor
    centres: torch.Tensor

    @property
    def buckets(self) -> int:
        return self.centres.shape[2]


@dataclass
class Walk:
    """Everything decided about a call: sorted queries, tiles, chosen buckets [B, H, C, K] and the offers they were chosen from."""

    order: torch.Tensor
    tiles: TileTable
    chosen: torch.Tensor
    offers: Offers

    def run(self, queries: Queries, buffer: KeyBuffer, backend: str) -> torch.Tensor:
        """Attention output [B, N, H, D]."""
        keys, values, bias = buffer.arguments()
        return registry.call("attend_ranges", backend, queries.q, keys, values, bias, self.order, self.tiles)


def plan_walk(queries: Queries, buffer: KeyBuffer, density: float, must: torch.Tensor | None, share: torch.Tensor | None,
              backend: str) -> Walk:
    """``must`` bool [B, H, C, K] or broadcastable: buckets taken before all others; ``share`` of the budget to spend."""
    order, offsets = registry.call("bucket_order", backend, queries.codes, queries.buckets)
    mass = expected_mass(queries.q.transpose(1, 2), queries.codes, queries.centres, buffer)
    counts = offsets[..., 1:] - offsets[..., :-1]
    offers = make_offers(mass, counts, buffer, density, None if must is None else must.expand_as(mass))
    chosen = choose(offers, share)
    rows = queries.q.shape[1]
    tile_rows = good_tile_rows(rows, queries.buckets)
    tiles = registry.call("tile_table", backend, offsets, key_ranges(chosen, buffer).contiguous(), tile_rows, rows)
    return Walk(order, tiles, chosen, offers)


def kept_mass(walk: Walk, queries: Queries, buffer: KeyBuffer, seed: int) -> torch.Tensor:
    """Dense softmax mass on visited keys, mean over 64 seeded queries: float32 [B, H]."""
    q = queries.q
    generator = torch.Generator().manual_seed(seed)
    some = torch.randint(q.shape[1], (min(RECALL_QUERIES, q.shape[1]),), generator=generator).to(q.device)
    scores = q[:, some].transpose(1, 2).float() @ buffer.keys.float().transpose(2, 3) * q.shape[-1] ** -0.5
    if buffer.bias is not None:
        scores = scores + buffer.bias[:, :, None]
    mass = scores.softmax(-1)
    total = torch.nn.functional.pad(mass.double().cumsum(-1), (1, 0))
    edges = buffer.offsets.long()[:, :, None].expand(-1, -1, len(some), -1)
    at = torch.gather(total, 3, edges)
    each = at[..., 1:] - at[..., :-1]
    code = queries.codes[:, :, some].long()[..., None].expand(-1, -1, -1, each.shape[-1])
    seen = torch.gather(walk.chosen, 2, code)
    always = total[..., buffer.always] + total[..., -1] - total[..., buffer.rows - buffer.own]
    return (always + (each * seen).sum(-1)).mean(-1).float()
