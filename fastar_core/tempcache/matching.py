"""Finds, for every token of a leaving frame, the group it resembles most: its neighbourhood first, the whole pool for misses."""

from __future__ import annotations

import torch

from .features import similarity
from .settings import TempCacheSettings

NO_MATCH = -4.0
MAX_SCORE_BYTES = 64 * 2**20


def neighbour_mask(rows: int, cols: int, reach: int) -> torch.Tensor:
    """[S, S] true where two tokens of a frame are at most ``reach`` rows and columns apart."""
    y = torch.arange(rows).repeat_interleave(cols)
    x = torch.arange(cols).repeat(rows)
    near = (y[:, None] - y[None]).abs() <= reach
    return near & ((x[:, None] - x[None]).abs() <= reach)


class Search:
    """Best group per token among pool rows. ``exact`` compares everything; ``int8`` compares 8-bit codes; ``lsh`` only rows that
    share a hash with the token in one of the tables."""

    def __init__(self, settings: TempCacheSettings) -> None:
        self.settings = settings
        self._planes: torch.Tensor | None = None

    def best(self, tokens: torch.Tensor, pool: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [B, G, N, F], pool [B, G, M, F], valid [B, G, M] -> similarity and index [B, G, N]."""
        codes = self._codes(tokens, pool, valid) if self.settings.search == "lsh" else None
        if self.settings.search == "int8":
            tokens, pool = _quantised(tokens), _quantised(pool)
        per_row = tokens.shape[0] * tokens.shape[1] * pool.shape[2] * 4
        step = max(1, MAX_SCORE_BYTES // max(1, per_row))
        scores, indices = [], []
        for start in range(0, tokens.shape[2], step):
            part = similarity(tokens[:, :, start:start + step], pool, self.settings.similarity == "logit")
            part = part.masked_fill(~valid[:, :, None], NO_MATCH)
            if codes is not None:
                mine, theirs = codes
                same = (mine[:, :, start:start + step, None] == theirs[:, :, None]).any(-1)
                part = part.masked_fill(~same, NO_MATCH)
            best, index = part.max(-1)
            scores.append(best)
            indices.append(index)
        return torch.cat(scores, -1), torch.cat(indices, -1)

    def _codes(self, tokens: torch.Tensor, pool: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sign hashes [B, G, N, tables] of mean-centred features (keys share a large offset that would swamp the signs)."""
        bits, tables = self.settings.bits, self.settings.tables
        if self._planes is None:
            generator = torch.Generator().manual_seed(self.settings.seed)
            self._planes = torch.randn(tokens.shape[-1], bits * tables, generator=generator)
        planes = self._planes.to(tokens.device)
        weight = valid[..., None].float()
        mean = (pool * weight).sum(2, keepdim=True) / weight.sum(2, keepdim=True).clamp_min(1)
        powers = 2 ** torch.arange(bits, device=tokens.device)

        def hashed(x: torch.Tensor) -> torch.Tensor:
            return (((x - mean) @ planes >= 0).unflatten(-1, (tables, bits)) * powers).sum(-1)

        return hashed(tokens), hashed(pool)


def _quantised(x: torch.Tensor) -> torch.Tensor:
    """Per-row symmetric 8-bit codes, back in float: what an int8 dot product with fp32 scales computes."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return (x / scale).round() * scale


def local_best(tokens: torch.Tensor, pool: torch.Tensor, last_slots: torch.Tensor, near: torch.Tensor,
               logit: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Best match among the groups that the tokens of the previous frame went to, near the same place.

    tokens [B, G, S, F]; last_slots [B, G, S] (-1 = none); near [S, S]. Returns similarity and slot [B, G, S].
    """
    held = last_slots.clamp_min(0)
    rows = torch.gather(pool, 2, held[..., None].expand(-1, -1, -1, pool.shape[-1]))
    scores = similarity(tokens, rows, logit)
    scores = scores.masked_fill(~near.to(scores.device) | (last_slots < 0)[:, :, None], NO_MATCH)
    best, index = scores.max(-1)
    return best, torch.gather(held, 2, index)
