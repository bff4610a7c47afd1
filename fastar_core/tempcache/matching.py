"""Finds, for every token of a leaving frame, the group it resembles most: its neighbourhood first, the whole pool for misses.

The pool is searched once per commit, for the tokens of all leaving frames together; groups that an earlier frame of the same
commit opened are only met in the neighbourhood.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...kernels import registry
from ...kernels.knobs import score_bytes
from .features import QueryMoment, features, similarity
from .rows import MeanRows, PackedRows
from .settings import TempCacheSettings

NO_MATCH = -4.0
CODED_AT_ONCE = 1024
CODE_LEVELS = 127


def pair_similarity(a: torch.Tensor, b: torch.Tensor, logit: bool) -> torch.Tensor:
    """Similarity [B, G, N] of row i of a with row i of b [B, G, N, F], as in ``similarity``."""
    if logit:
        return 1 - (a - b).square().sum(-1).sqrt()
    return (a * b).sum(-1)


def local_best(tokens: torch.Tensor, rows: torch.Tensor, last_slots: torch.Tensor, grid: tuple[int, int], reach: int,
               logit: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Best match among the groups that the tokens of the previous frame went to, at most ``reach`` rows and columns away.

    tokens [B, G, S, F] of a frame of ``grid`` = (rows, columns); last_slots [B, G, S] (-1 = none) and the features ``rows``
    [B, G, S, F] of those groups. Returns similarity and slot [B, G, S]. One pass per offset: memory stays in proportion to S.
    """
    pad = torch.nn.functional.pad
    around = pad(rows.unflatten(2, grid), (0, 0, reach, reach, reach, reach))
    slots = pad(last_slots.unflatten(2, grid), (reach, reach, reach, reach), value=-1)
    mine = tokens.unflatten(2, grid)
    best, found = tokens.new_full(mine.shape[:-1], NO_MATCH), torch.zeros_like(last_slots).unflatten(2, grid)
    for dy in range(2 * reach + 1):
        for dx in range(2 * reach + 1):
            window = (..., slice(dy, dy + grid[0]), slice(dx, dx + grid[1]))
            here = slots[window]
            score = pair_similarity(mine, around[..., window[1], window[2], :], logit).masked_fill(here < 0, NO_MATCH)
            found = torch.where(score > best, here, found)
            best = torch.maximum(score, best)
    return best.flatten(2), found.flatten(2)


class RowIndex:
    """What the tokens of one commit are compared with: a feature row per pool row as the commit finds it.

    ``rows`` [B, G, capacity, F] are float32 features, or 8-bit codes with a ``scale`` [B, G, capacity]. Rows of free groups may
    hold anything: they are never asked for.
    """

    def __init__(self, search: Search, keys: MeanRows | PackedRows, valid: torch.Tensor, moment: QueryMoment | None,
                 leaving: Sequence[torch.Tensor]) -> None:
        """``valid`` [B, G, capacity]: where a group lives; leaving: keys [B, H, S, D] of each frame that will be taken in."""
        self.moment, self._keys, self._shared = moment, keys, search.settings.shared
        # a common shift changes no distance, and near zero less is lost to rounding
        self._centre = None if moment is None else features(leaving[0], moment, self._shared).mean(2, keepdim=True)
        starts = range(0, valid.shape[-1], CODED_AT_ONCE)  # a part stays in the cache, and the whole is never there in float32
        parts = [search.coded(self.features(keys.read(at, at + CODED_AT_ONCE))) for at in starts]
        self.rows = torch.cat([rows for rows, _ in parts], 2)
        self.scale = _joined_scales([scale for _, scale in parts if scale is not None], self.rows)
        self.tokens = [self.features(k) for k in leaving]
        sizes = [k.shape[2] for k in leaving]
        score, slot = search.best(torch.cat(self.tokens, 2), self.rows, self.scale, valid)
        self.found = list(zip(score.split(sizes, 2), slot.split(sizes, 2)))

    def features(self, keys: torch.Tensor) -> torch.Tensor:
        """Full feature rows [B, G, N, F] of keys [B, H, N, D]."""
        rows = features(keys, self.moment, self._shared)
        return rows if self._centre is None else rows - self._centre

    def at(self, slot: torch.Tensor) -> torch.Tensor:
        """Full feature rows [B, G, N, F] of the pool rows ``slot`` [B, G, N] as they are now."""
        return self.features(self._keys.pick(slot))

    def best(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Row found [B, G, S] for the tokens of leaving frame ``number``, and its similarity as it is now."""
        score, slot = self.found[number]
        now = pair_similarity(self.tokens[number], self.at(slot), self.moment is not None)
        return torch.where(score > NO_MATCH, now, NO_MATCH), slot

    def follow(self, moved: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Groups went to other rows; ``moved`` says where rows [B, G, N] stand now."""
        self.found = [(score, moved(slot)) for score, slot in self.found]

    def earlier(self, tokens: torch.Tensor, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Similarity and number [B, G, S] of the token to the left or above, whichever is nearer (the first one has none)."""
        logit = self.moment is not None
        score = tokens.new_full((*tokens.shape[:2], rows, cols, 2), NO_MATCH)
        grid = tokens.unflatten(2, (rows, cols))
        score[:, :, :, 1:, 0] = pair_similarity(grid[:, :, :, 1:], grid[:, :, :, :-1], logit)
        score[:, :, 1:, :, 1] = pair_similarity(grid[:, :, 1:], grid[:, :, :-1], logit)
        best, above = score.flatten(2, 3).max(-1)
        number = torch.arange(rows * cols, device=tokens.device) - torch.where(above > 0, cols, 1)
        return best, number.clamp_min(0)


class Search:
    """Best group per token among all pool rows. ``exact`` compares everything; ``int8`` compares 8-bit codes; ``lsh`` only rows
    that share a sign hash with the token in one of the tables."""

    def __init__(self, settings: TempCacheSettings) -> None:
        self.settings = settings
        self.backend = "auto"
        self._planes: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        return [] if self._planes is None else [self._planes]

    def coded(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Feature rows [B, G, N, F] as they are compared, and their scales [B, G, N] if those are codes."""
        if self.settings.search != "int8":
            return x, None
        if self.settings.similarity == "paper":  # unit rows: with one scale for all, codes rank as they are
            return (x * CODE_LEVELS).round_().to(torch.int8), x.new_full((), 1 / CODE_LEVELS).expand(x.shape[:-1])
        scale = x.abs().amax(-1).clamp_min(1e-12) / CODE_LEVELS
        return (x / scale[..., None]).round_().to(torch.int8), scale

    def best(self, tokens: torch.Tensor, pool: torch.Tensor, scale: torch.Tensor | None,
             valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Full features tokens [B, G, N, F], pool [B, G, M, F] and scale as ``coded`` gives them, valid [B, G, M] where a row
        counts -> similarity (of the codes) and row [B, G, N]."""
        if self.settings.search == "lsh":
            return self._by_hash(tokens, pool, valid)
        logit = self.settings.similarity == "logit"
        rows, token_scale = self.coded(tokens)
        scales = () if scale is None else (token_scale, scale)
        where, score = registry.call("nearest", self.backend, rows, pool, valid, "l2" if logit else "dot", *scales)
        nothing = where < 0
        if logit:
            score = 1 - (-score).clamp_min(0).sqrt()
        return score.masked_fill(nothing, NO_MATCH), where.clamp_min(0)

    def _by_hash(self, tokens: torch.Tensor, pool: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pool = pool.masked_fill(~valid[..., None], 0)
        mine, theirs = self._hashes(tokens, pool, valid)
        step = max(1, score_bytes() // (8 * pool.shape[0] * pool.shape[1] * pool.shape[2]))
        parts = []
        for some, codes in zip(tokens.split(step, 2), mine.split(step, 2)):
            same = torch.zeros((*some.shape[:3], pool.shape[2]), dtype=torch.bool, device=pool.device)
            for table in range(self.settings.tables):
                same |= codes[..., table][..., :, None] == theirs[..., table][..., None, :]
            same &= valid[:, :, None]
            parts.append(similarity(some, pool, self.settings.similarity == "logit").masked_fill_(~same, NO_MATCH).max(-1))
        return torch.cat([best for best, _ in parts], 2), torch.cat([index for _, index in parts], 2)

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


def _joined_scales(scales: Sequence[torch.Tensor], rows: torch.Tensor) -> torch.Tensor | None:
    """Scales of all rows; a common one stays a view, by which the search knows it."""
    if not scales:
        return None
    return scales[0][..., :1].expand(rows.shape[:-1]) if scales[0].stride(-1) == 0 else torch.cat(list(scales), -1)
