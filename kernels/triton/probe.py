"""Compiles and runs one kernel that uses the matrix units. Also started as a script, alone, so it imports nothing of the pack."""

# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False, disallow-incomplete-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl

SIZE = 32


@triton.jit
def _product(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)
    square = at[:, None] * N + at[None, :]
    tl.store(out + square, tl.dot(tl.load(a + square), tl.load(b + square)))


def run() -> None:
    """Raises what the compiler or the driver raises, or RuntimeError for a wrong product."""
    a, b = (torch.randn(SIZE, SIZE, dtype=torch.float16, device="cuda") for _ in range(2))
    out = torch.empty(SIZE, SIZE, dtype=torch.float32, device="cuda")
    _product[(1,)](a, b, out, N=SIZE)
    if not torch.allclose(out, a.float() @ b.float(), atol=0.05):
        raise RuntimeError("a small matrix product came out wrong")


if __name__ == "__main__":
    run()
