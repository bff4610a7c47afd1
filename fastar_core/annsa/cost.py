"""Predicts whether a sparse call is worth it, from sizes alone: no measuring while a run goes on, no host read."""

from __future__ import annotations

from dataclasses import dataclass

MARGIN = 1.1


@dataclass(frozen=True)
class Rates:
    """Speeds of one kind of device: attention flop per second dense and sparse, seconds per sparse call and per group of queries,
    bytes per second of gathering keys (0 = the kernel reads them in place), flop per second of the bucket search."""

    dense: float
    sparse: float
    call: float
    group: float
    gather: float
    search: float


# CPU: one core of a server, float32 (measured 0.39 and 0.22 of dense at densities .28 and .15, 1560 x 20000). CUDA: H200 class, flash
# kernels 600 Tflop/s, range kernel 430, some ten launches per call. Elsewhere nothing is known: the CUDA overheads at a tenth of the rates.
RATES = {"cpu": Rates(1.05e11, 1.0e11, 1.5e-3, 6e-5, 6e9, 5e10), "cuda": Rates(6e14, 4.3e14, 1.2e-4, 0.0, 0.0, 2e14)}
OTHER = Rates(6e13, 4.3e13, 1.2e-4, 0.0, 0.0, 2e13)


@dataclass(frozen=True)
class CallSize:
    """One attention call: queries, keys, batch rows times heads, head dim, groups of queries, key buckets, and how many calls share
    one sorting of the keys."""

    queries: int
    keys: int
    heads: int
    dim: int
    groups: int
    buckets: int
    calls_per_sort: int = 3


def predicted_times(size: CallSize, density: float, device: str, element_bytes: int = 4) -> tuple[float, float]:
    """(dense, sparse) seconds."""
    rates = RATES.get(device, OTHER)
    flop = 4.0 * size.queries * size.keys * size.heads * size.dim
    search = 2.0 * size.heads * size.dim * size.buckets * (2 * size.keys / size.calls_per_sort + size.queries)
    sparse = flop * density / rates.sparse + search / rates.search + rates.call + rates.group * size.groups * size.heads
    if rates.gather:
        moved = 2.0 * element_bytes * size.dim * size.heads * size.keys
        sparse += moved * (density * size.groups + 1.0 / size.calls_per_sort) / rates.gather
    return flop / rates.dense, sparse


def pays(size: CallSize, density: float, device: str, element_bytes: int = 4) -> bool:
    """Sparse is predicted to win by more than 10 %."""
    dense, sparse = predicted_times(size, density, device, element_bytes)
    return sparse * MARGIN < dense
