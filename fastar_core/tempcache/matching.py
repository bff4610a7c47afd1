"""Finds, for every token of a leaving frame, the group it resembles most: its neighbourhood first, the whole pool for misses."""

from __future__ import annotations

import torch

from ...kernels import registry
from .features import similarity
from .settings import TempCacheSettings

NO_MATCH = -4.0
CODE_LEVELS = 127


def neighbour_mask(rows: int, cols: int, reach: int, device: torch.device | None = None) -> torch.Tensor:
    """[S, S] true where two tokens of a frame are at most ``reach`` rows and columns apart."""
    cell = torch.arange(rows * cols, device=device)
    y, x = cell // cols, cell % cols
    near = (y[:, None] - y[None]).abs() <= reach
    return near & ((x[:, None] - x[None]).abs() <= reach)


def local_best(tokens: torch.Tensor, pool: torch.Tensor, last_slots: torch.Tensor, near: torch.Tensor,
               logit: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Best match among the groups that the tokens of the previous frame went to, near the same place.

    tokens [B, G, S, F]; last_slots [B, G, S] (-1 = none); near [S, S]. Returns similarity and slot [B, G, S].
    """
    held = last_slots.clamp_min(0)
    rows = torch.gather(pool, 2, held[..., None].expand(-1, -1, -1, pool.shape[-1]))
    scores = similarity(tokens, rows, logit)
    scores = scores.masked_fill(~near | (last_slots < 0)[:, :, None], NO_MATCH)
    best, index = scores.max(-1)
    return best, torch.gather(held, 2, index)


class Search:
    """Best group per token among all pool rows. ``exact`` compares everything; ``int8`` compares 8-bit codes; ``lsh`` only rows
    that share a sign hash with the token in one of the tables."""

    def __init__(self, settings: TempCacheSettings) -> None:
        self.settings = settings
        self.backend = "auto"
        self._planes: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        return [] if self._planes is None else [self._planes]

    def best(self, tokens: torch.Tensor, pool: torch.Tensor, valid: torch.Tensor,
             missed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """tokens [B, G, N, F], pool [B, G, M, F], valid [B, G, M] -> similarity and index [B, G, N].

        Only tokens in ``missed`` [B, G, N] need an answer. On the CPU the others are left out of the work; elsewhere that would
        make the host wait for the device.
        """
        if tokens.device.type != "cpu":
            return self._search(tokens, pool, valid)
        score = torch.full(missed.shape, NO_MATCH)
        index = torch.zeros(missed.shape, dtype=torch.int64)
        asked = missed.flatten(0, 1).any(0).nonzero()[:, 0]
        if len(asked):
            score[:, :, asked], index[:, :, asked] = self._search(tokens[:, :, asked], pool, valid)
        return score, index

    def _search(self, tokens: torch.Tensor, pool: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.settings.search == "lsh":
            return self._by_hash(tokens, pool, valid)
        logit = self.settings.similarity == "logit"
        scales: tuple[torch.Tensor, ...] = ()
        if self.settings.search == "int8":
            (tokens, first), (pool, second) = _codes(tokens), _codes(pool)
            scales = (first, second)
        where, score = registry.call("nearest", self.backend, tokens, pool, valid, "l2" if logit else "dot", *scales)
        nothing = where < 0
        if logit:
            score = 1 - (-score).clamp_min(0).sqrt()
        return score.masked_fill(nothing, NO_MATCH), where.clamp_min(0)

    def _by_hash(self, tokens: torch.Tensor, pool: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mine, theirs = self._hashes(tokens, pool, valid)
        scores = similarity(tokens, pool, self.settings.similarity == "logit").masked_fill(~valid[:, :, None], NO_MATCH)
        same = torch.zeros(scores.shape, dtype=torch.bool, device=scores.device)
        for table in range(self.settings.tables):
            same |= mine[..., table][..., :, None] == theirs[..., table][..., None, :]
        best, index = scores.masked_fill(~same, NO_MATCH).max(-1)
        return best, index

    def _hashes(self, tokens: torch.Tensor, pool: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sign hashes [B, G, N, tables] of mean-centred features (keys share a large offset that would swamp the signs)."""
        bits, tables = self.settings.bits, self.settings.tables
        if self._planes is None:
            generator = torch.Generator().manual_seed(self.settings.seed)
            self._planes = torch.randn(tokens.shape[-1], bits * tables, generator=generator).to(tokens.device)
        weight = valid[..., None].float()
        mean = (pool * weight).sum(2, keepdim=True) / weight.sum(2, keepdim=True).clamp_min(1)
        powers = 2 ** torch.arange(bits, device=tokens.device)
        signs = [((x - mean) @ self._planes >= 0).unflatten(-1, (tables, bits)) for x in (tokens, pool)]
        return (signs[0] * powers).sum(-1), (signs[1] * powers).sum(-1)


def _codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-row symmetric int8 codes and their float32 scales."""
    scale = x.abs().amax(-1).clamp_min(1e-12) / CODE_LEVELS
    return (x / scale[..., None]).round().to(torch.int8), scale
