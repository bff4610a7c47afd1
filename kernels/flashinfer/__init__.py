"""FlashInfer's ragged prefill kernel with a per-key bias. Optional, and used only when asked for.

Its first use compiles with nvcc for minutes, and every call reads the tile table on the host and plans there.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from pathlib import Path

import torch

OLDEST_CAPABILITY = (8, 0)


def why_not_here(device: torch.device, forced: bool) -> str | None:
    """Asked at each call, so it only looks at what costs nothing."""
    if device.type != "cuda" or torch.version.hip:
        return f"it runs on NVIDIA GPUs, the tensors are on {'ROCm' if torch.version.hip else device.type}"
    if sys.platform != "linux":
        return f"it exists for Linux only, this is {sys.platform}"
    if not forced:
        return "it is used only when asked for (FASTAR_BACKEND=flashinfer): it compiles for minutes at its first use"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return f"it needs compute capability 8.0, the GPU has {capability[0]}.{capability[1]}"
    return None


def probe() -> str | None:
    """Looks for the package and for what it compiles with."""
    importlib.import_module("flashinfer.prefill")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if shutil.which("nvcc") is None and not Path(home, "bin", "nvcc").is_file():
        return "there is no nvcc (neither on the PATH nor in CUDA_HOME), and FlashInfer brings no compiled kernel"
    if shutil.which("ninja") is None:
        return "there is no ninja on the PATH, and FlashInfer compiles with it"
    return None
