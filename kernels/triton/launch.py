"""Launching: compile errors become OpFailedError, so that another back-end can take over."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.errors import TritonError

from ..constraints import Rule
from ..registry import OpFailedError
from . import interpreting

HALF = (torch.float16, torch.bfloat16)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def max_head_dim(name: str) -> Rule:
    """Largest head dimension whose tiles compile without spills, for ops with matrix products; ``name``: argument to look at."""
    return Rule(
        "a head dimension up to 256, or 128 in float32",
        lambda call: call[name].shape[3] <= (128 if call[name].dtype == torch.float32 else 256),
    )


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], device: torch.device, *args: Any, **options: Any) -> None:
    """Starts ``kernel`` on the GPU of its tensors, which need not be the current one."""
    if 0 in grid:
        return
    try:
        if interpreting():
            kernel[grid](*args, **options)
            return
        with torch.cuda.device(device):
            kernel[grid](*args, **options)
    except TritonError as error:
        raise OpFailedError(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    except RuntimeError as error:
        if "PassManager" not in str(error):
            raise
        raise OpFailedError(f"the compiler failed: {error}".splitlines()[0]) from error


def arch(device: torch.device) -> str:
    """'sm_90' and so on, or the AMD name ('gfx942'); the interpreter takes the shapes of sm_80."""
    if interpreting():
        return "sm_80"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def padded_dim(dim: int) -> int:
    """Head dimension as tile width: a power of two, at least 16."""
    return max(16, triton.next_power_of_2(dim))
