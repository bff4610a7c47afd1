"""Triton kernels: the default on NVIDIA GPUs under Linux; elsewhere only when asked for.

With TRITON_INTERPRET=1 they run on the CPU, which is how they are tested without a GPU (again only when asked for).
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import torch

OLDEST = (3, 4)
OLDEST_CAPABILITY = (8, 0)
PROBE = Path(__file__).with_name("probe.py")
PROBE_SECONDS = 120


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def why_not_here(device: torch.device, forced: bool) -> str | None:
    """Asked at each call, so it only looks at what costs nothing."""
    if interpreting():
        return None if forced and device.type == "cpu" else "its interpreter is for CPU tensors and only when asked for"
    if device.type != "cuda":
        return f"it runs on CUDA devices, the tensors are on {device.type}"
    if torch.version.hip or sys.platform != "linux":
        where = "ROCm" if torch.version.hip else sys.platform
        return None if forced else f"on {where} it is used only when asked for (FASTAR_BACKEND=triton)"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return f"it needs compute capability 8.0, the GPU has {capability[0]}.{capability[1]}"
    return None


def probe() -> str | None:
    """Compiles and runs one small kernel.

    Outside of NVIDIA on Linux a child process does it first: a compiler that aborts takes only the child with it.
    """
    version = importlib.import_module("triton").__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"Triton {version} is too old, {OLDEST[0]}.{OLDEST[1]} or newer is needed"
    if interpreting():
        return None
    if torch.version.hip or sys.platform != "linux":
        reason = _child_dies()
        if reason is not None:
            return reason
    importlib.import_module(".probe", __name__).run()
    return None


def _child_dies() -> str | None:
    """Why the child that compiles the probe kernel did not come back well, or None."""
    try:
        done = subprocess.run(
            [sys.executable, "-s", str(PROBE)], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the probe of its compiler did not finish: {error}"
    if done.returncode == 0:
        return None
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return f"its compiler failed in a child process (exit code {done.returncode}): {last[:300]}"
