"""Correctness on the device at hand: every op of every back-end against float64, on random data, in every dtype."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fastar_pack.kernels import registry
from fastar_pack.kernels.tiles import good_tile_rows
from kernels.compare import TOLERANCE, fault, widened, with_lse
from kernels.more_cases import CASES, Case

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Where the checks run. ``seconds``: time they may take; ``seed`` is drawn anew by the caller."""

    device: torch.device
    backends: tuple[str, ...]
    seed: int
    seconds: float = 1e9

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


def backends_for(device: torch.device, wanted: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Back-ends to check on the device: those asked for, else what would be used there, torch_fast in any case."""
    names = wanted or (("triton", "torch_fast") if device.type == "cuda" else ("torch_fast",))
    for name in names:
        reason = registry.unavailable(name, device, forced=True)
        if reason:
            raise SystemExit(f"back-end {name} cannot be checked here: {reason}")
    return names


def large_cases(rows: int, keys: int, heads: int, dim: int, buckets: int = 8) -> list[Case]:
    """The path of sparse attention at the size of a real block: hash, order, table, attention over ranges."""

    def qkv(g: torch.Generator, dtype: torch.dtype) -> list[torch.Tensor]:
        return [(torch.randn(1, n, heads, dim, generator=g) * 1.2).to(dtype) for n in (rows, keys, keys)]

    def dense(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        return *qkv(g, dtype), torch.randint(1, 750, (1, heads, keys), generator=g).float().log()

    def ranges(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
        q, k, v = qkv(g, dtype)
        codes = torch.randint(0, buckets, (1, heads, rows), generator=g, dtype=torch.int32)
        order, offsets = registry.call("bucket_order", "torch_fast", codes, buckets)
        lows = torch.arange(buckets, dtype=torch.int32) * (keys // buckets)
        spans = torch.stack([lows, lows + keys // buckets], -1)[None, None, :, None].expand(1, heads, -1, 1, -1).contiguous()
        tiles = registry.call("tile_table", "torch_fast", offsets, spans, good_tile_rows(rows, buckets), rows)
        return q, k, v, torch.randint(1, 9, (1, heads, keys), generator=g).float().log(), order, tiles

    return [Case("attend", f"{rows} x {keys}", dense), Case("attend_ranges", f"{rows} x {keys}, {buckets} buckets", ranges)]


def check(place: Place, cases: list[Case]) -> Iterator[dict[str, Any]]:
    """One row per case, dtype and back-end: what is wrong with it in words, or None."""
    begun = time.monotonic()
    for case in cases:
        for dtype in DTYPES if case.floating else (torch.float32,):
            if case.wide and dtype == torch.float32:
                continue
            if time.monotonic() - begun > place.seconds:
                yield {"case": case.name, "dtype": str(dtype)[6:], "backend": "all", "fault": "no time left for it"}
                return
            args = case.args(dtype, str(place.device), place.seed)
            want = registry.call(case.op, "reference", *widened(args), **with_lse(case.op, args))
            for name in place.backends:
                yield {"case": case.name, "dtype": str(dtype)[6:], "backend": name,
                       "fault": _fault(case, args, name, want, dtype)}  # fmt: skip


def _fault(case: Case, args: tuple[Any, ...], backend: str, want: Any, dtype: torch.dtype) -> str | None:
    limit = TOLERANCE[dtype if case.floating else torch.float32]
    try:
        got = registry.call(case.op, backend, *args, **with_lse(case.op, args))
    except (RuntimeError, ValueError) as error:  # a report of everything is wanted, not of the first failure
        return f"{type(error).__name__}: {error}".splitlines()[0][:300]
    return fault(case.op, args, got, want, limit)


def run(place: Place, say: Say) -> list[dict[str, Any]]:
    """The case table and large random calls; prints faults as they come."""
    size = (4680, 9000, 4, 128) if place.is_gpu else (300, 700, 2, 64)
    rows = []
    for row in check(place, [*CASES, *large_cases(*size)]):
        rows.append(row)
        if row["fault"]:
            say(f"  WRONG {row['backend']} {row['case']} {row['dtype']}: {row['fault']}")
    wrong = sum(row["fault"] is not None for row in rows)
    say(f"correctness: {len(rows) - wrong} of {len(rows)} right ({', '.join(place.backends)}, seed {place.seed})")
    return rows
