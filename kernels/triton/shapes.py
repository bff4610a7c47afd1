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


# For small tiles: without a bound the assembler aims at more blocks per processor and spills for it. Large ones are better off
# without (at the bound, 3.6.0 spills on sm_120).
NVIDIA_REGISTERS = 255


@dataclass(frozen=True)
class Shape:
    """Query rows and key rows per tile, warps, pipeline stages, how float32 products are made, bound on registers."""

    rows: int
    keys: int
    warps: int
    stages: int
    precision: str
    registers: int | None = None

    def options(self) -> dict[str, int]:
        """What the compiler is told."""
        bound = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **bound}


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


def attend_shape(arch: str, dtype: torch.dtype, dim: int, rows: int = 128) -> Shape:
    """Shape for padded head dimension ``dim``; ``rows`` = most query rows that a tile has to take (128 at most).

    128 x 64 tiles spill everywhere but on sm_90: their K and V operands alone fill the registers of the older matrix
    instructions. 128 x 32 reads as few bytes per product, since that depends on the query rows.
    """
    kind, exact = family(arch), precision(arch)
    if dtype == torch.float32:
        return Shape(16, 32, 4, 1, exact)
    if kind == "gfx942":
        return Shape(min(rows, 64), 32, 8 if dim > 128 else 4, 1, exact)
    if dim > 128:
        return Shape(min(rows, 64), 32, 8, 2, exact)
    if rows <= 64:
        return Shape(max(rows, 16), 32, 4, 3, exact, NVIDIA_REGISTERS)
    return Shape(128, 64 if kind == "sm_90" else 32, 8, 3, exact, NVIDIA_REGISTERS if dim <= 64 else None)


def search_shape(arch: str, dtype: torch.dtype, dim: int) -> Shape:
    """Shape of the nearest-key search."""
    kind, exact = family(arch), precision(arch)
    if kind == "gfx942":
        return Shape(64, 32, 4, 1, exact)
    if dtype == torch.float32:
        return Shape(32, 16, 4, 1, exact)
    return Shape(32, 32, 4, 1, exact) if dim > 128 else Shape(64, 64 if kind == "sm_90" else 32, 4, 3, exact)
