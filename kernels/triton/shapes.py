"""Tile shapes per GPU family, by what compiles without spills into its shared memory (checked ahead of time for each entry).

No autotuning: it would need a live driver in tests and make results depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SHARED_LIMIT = {
    "sm_80": 166_912,
    "sm_86": 101_376,
    "sm_89": 101_376,
    "sm_90": 232_448,
    "sm_100": 232_448,
    "sm_120": 101_376,
    "gfx942": 65_536,
}


@dataclass(frozen=True)
class Shape:
    """Query rows and key rows per tile, warps, pipeline stages, and how float32 products are made."""

    rows: int
    keys: int
    warps: int
    stages: int
    precision: str


def family(arch: str) -> str:
    """The entry of the tables that serves ``arch``: an unknown GPU gets the smallest shapes of its maker."""
    if arch in SHARED_LIMIT:
        return arch
    if arch.startswith("gfx"):
        return "gfx942"
    number = int(arch.removeprefix("sm_"))
    return "sm_100" if number == 103 else "sm_120" if number >= 110 else "sm_86"


def precision(arch: str) -> str:
    """float32 products on NVIDIA take three TF32 products (error 1e-6); AMD has no such path everywhere."""
    return "ieee" if arch.startswith("gfx") else "tf32x3"


def attend_shape(arch: str, dtype: torch.dtype, dim: int, rows: int) -> Shape:
    """Shape for padded head dimension ``dim``; ``rows`` = most query rows that a tile has to take (128 at most)."""
    kind, exact = family(arch), precision(arch)
    if dtype == torch.float32 or dim > 128:
        warps = 4
        keys = 16 if dim * (2 if dtype == torch.float32 else 1) > 256 else 32
        return Shape(min(rows, 32), keys, warps, 1, exact)
    if kind == "gfx942":
        return Shape(min(rows, 64), 64 if dim == 64 else 32, 4, 1, exact)
    if rows <= 64:
        return Shape(max(rows, 16), 64 if kind in ("sm_89", "sm_90", "sm_100") else 32, 4, 2, exact)
    return Shape(128, 64, 8, 3, exact)


def search_shape(arch: str, dtype: torch.dtype, dim: int) -> Shape:
    """Shape of the nearest-key search."""
    if dtype == torch.float32 or dim > 128:
        return Shape(32, 32, 4, 1, precision(arch))
    if family(arch) == "gfx942":
        return Shape(64, 64, 4, 1, precision(arch))
    return Shape(64, 64, 4, 3, precision(arch))
