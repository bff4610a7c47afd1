"""The case table, second part: search, compaction, merging, prompt pruning; and the whole table."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.cases import (
    ATTEND,
    ATTEND_RANGES,
    BUCKET_ORDER,
    HASH_CODES,
    INF,
    TILE_TABLE,
    Args,
    Case,
    framed,
    rows,
)

Build = Callable[[torch.Generator, torch.dtype], Args]


def _valid(g: torch.Generator, batch: int, heads: int, keys: int) -> Tensor:
    """A third of the keys does not count, and none of the last head's first batch row."""
    valid = torch.rand(batch, heads, keys, generator=g) > 0.33
    valid[0, -1] = False
    return valid


def _poison_invalid(keys: Tensor, valid: Tensor) -> Tensor:
    keys[~valid] = float("nan")
    return keys


def _search(batch: int, heads: int, n: int, m: int, dim: int, metric: str, some: bool = False) -> Build:
    def build(g: torch.Generator, dtype: torch.dtype) -> Args:
        q, keys = (rows(g, dtype, batch, heads, count, dim, axis=2) for count in (n, m))
        valid = _valid(g, batch, heads, m) if some else None
        return q, keys if valid is None else _poison_invalid(keys, valid), valid, metric

    return build


def _int8(heads: int, n: int, m: int, dim: int, metric: str) -> Build:
    def build(g: torch.Generator, _: torch.dtype) -> Args:
        q, keys = (framed(torch.randint(-127, 128, (1, heads, c, dim), generator=g, dtype=torch.int8), 2) for c in (n, m))
        scales = [torch.rand(1, heads, c, generator=g) * 0.02 + 0.001 for c in (n, m)]
        return q, keys, _valid(g, 1, heads, m), metric, *scales

    return build


def _int8_of_one_scale(metric: str, some: bool) -> Build:
    def build(g: torch.Generator, dtype: torch.dtype) -> Args:
        q, keys, valid, _, q_scale, key_scale = _int8(2, 40, 200, 128, metric)(g, dtype)
        return q, keys, valid if some else None, metric, q_scale, key_scale[..., :1].expand(-1, -1, keys.shape[2])

    return build


def _ties(g: torch.Generator, dtype: torch.dtype) -> Args:
    """Every key is there four times, far apart: the first copy has to win. Small integers, so that sums are exact."""
    q, keys = (torch.randint(-3, 4, (1, 2, n, 64), generator=g).to(dtype) for n in (30, 40))
    return q, torch.cat([keys] * 4, 2), None, "dot"


def _zero_vectors(g: torch.Generator, dtype: torch.dtype) -> Args:
    q, keys = (rows(g, dtype, 1, 2, n, 64, axis=2) for n in (9, 20))
    q[:, :, 3], keys[:, :, 5] = 0, 0
    return q, keys, None, "cosine"


NEAREST = [
    ("dot, ragged tails", _search(2, 2, 70, 150, 64, "dot")),
    ("cosine, head dimension 128", _search(1, 2, 40, 90, 128, "cosine")),
    ("l2, head dimension 40", _search(1, 2, 33, 65, 40, "l2")),
    ("cosine, NaN in keys that do not count, a head without keys", _search(2, 2, 40, 80, 64, "cosine", some=True)),
    ("dot, NaN in keys that do not count", _search(1, 2, 20, 70, 64, "dot", some=True)),
    ("l2, NaN in keys that do not count", _search(1, 2, 20, 70, 64, "l2", some=True)),
    ("equal keys", _ties),
    ("zero vectors", _zero_vectors),
    ("one key", _search(1, 1, 5, 1, 64, "cosine")),
    ("no keys", _search(1, 2, 5, 0, 64, "dot")),
    ("no rows", _search(1, 2, 0, 9, 64, "l2")),
    *[(f"int8 codes, {metric}", _int8(2, 40, 100, 64, metric)) for metric in ("dot", "cosine", "l2")],
    *[(f"int8 codes of one scale, {metric}{', some count' if some else ''}", _int8_of_one_scale(metric, some))
      for metric in ("dot", "l2") for some in (False, True)],
]


def _near(build: Build, count: int) -> Build:
    """The same call with ``count`` candidates per row (some of them 'none', row 0 has none at all)."""

    def with_candidates(g: torch.Generator, dtype: torch.dtype) -> Args:
        q, keys, *rest = build(g, dtype)
        chosen = torch.randint(-1, max(1, keys.shape[2]), (q.shape[2], count), generator=g, dtype=torch.int32)
        chosen[:1] = -1
        return q, keys, chosen.clamp_max(keys.shape[2] - 1), *rest

    return with_candidates


NEAREST_CANDIDATES = [(why, _near(build, 9)) for why, build in NEAREST if why not in ("equal keys", "zero vectors")] + [
    ("equal keys", _near(_ties, 33)),
    ("one candidate", _near(_search(1, 2, 11, 20, 64, "cosine"), 1)),
    ("no candidates", _near(_search(1, 2, 11, 20, 64, "dot"), 0)),
]


def _compact(batch: int, heads: int, n: int, dim: int, slots: int, used: int, dropped: float = 0.3) -> Build:
    def build(g: torch.Generator, dtype: torch.dtype) -> Args:
        x = rows(g, dtype, batch, heads, n, dim, axis=2)
        group = torch.randint(0, max(1, used), (batch, heads, n), generator=g)
        group[torch.rand(batch, heads, n, generator=g) < dropped] = -1
        x[group < 0] = float("nan")
        weight = torch.randint(0, 5, (batch, heads, n), generator=g).float()
        return x, weight, group, slots

    return build


COMPACT = [
    ("dropped rows hold NaN, empty slots", _compact(2, 2, 300, 64, 90, 60)),
    ("one slot for all rows, head dimension 128", _compact(1, 2, 70, 128, 1, 1, dropped=0.0)),
    ("head dimension 40", _compact(1, 3, 70, 40, 20, 20)),
    ("every row dropped", _compact(1, 2, 30, 64, 5, 5, dropped=2.0)),
    ("no rows", _compact(1, 2, 0, 64, 4, 4)),
    ("float32 means", lambda g, dtype: (*_compact(1, 2, 90, 64, 20, 20)(g, dtype), torch.float32)),
]


def _parts(count: int, batch: int, n: int, heads: int, dim: int) -> Build:
    def build(g: torch.Generator, dtype: torch.dtype) -> Args:
        parts = []
        for index in range(count):
            out = rows(g, dtype, batch, n, heads, dim)
            lse = torch.randn(batch, heads, n, generator=g) * 4
            if n:
                empty = torch.rand(batch, heads, n, generator=g) < 0.3
                empty[0, 0, 0] = True
                lse[empty] = -INF
                out[empty.transpose(1, 2)] = float("nan") if index else 7.0
            parts.append((out, lse))
        return (parts,)

    return build


MERGE_LSE = [
    ("two parts, empty ones hold anything", _parts(2, 2, 70, 2, 64)),
    ("three parts, head dimension 40", _parts(3, 1, 33, 3, 40)),
    ("one part", _parts(1, 1, 5, 2, 128)),
    ("no rows", _parts(2, 1, 0, 2, 64)),
]


def _keep(lead: tuple[int, ...], nq: int, nk: int, codes: int) -> Build:
    return lambda g, _: tuple(torch.randint(0, codes, (*lead, n), generator=g, dtype=torch.int32) for n in (nq, nk))


PROMPT_KEEP = [
    ("some kept", _keep((2, 3), 150, 90, 300)),
    ("two tables", _keep((2, 1, 2), 40, 60, 100)),
    ("one key, one query", _keep((1, 1), 1, 1, 2)),
    ("no queries", _keep((1, 2), 0, 8, 4)),
    ("large codes", lambda g, _: tuple(torch.randint(2**30, 2**30 + 40, (1, 2, n), generator=g).int() for n in (20, 50))),
]

_INTEGER_OPS = ("bucket_order", "tile_table", "prompt_keep")
_BY_OP = {
    "attend": ATTEND,
    "attend_ranges": ATTEND_RANGES,
    "hash_codes": HASH_CODES,
    "bucket_order": BUCKET_ORDER,
    "tile_table": TILE_TABLE,
    "nearest": NEAREST,
    "nearest_candidates": NEAREST_CANDIDATES,
    "compact": COMPACT,
    "merge_lse": MERGE_LSE,
    "prompt_keep": PROMPT_KEEP,
}
CASES = [
    Case(op, why, build, floating=op not in _INTEGER_OPS and not why.startswith("int8"))
    for op, table in _BY_OP.items()
    for why, build in table
]
