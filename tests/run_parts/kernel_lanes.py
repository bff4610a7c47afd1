"""What the lanes for compiled kernels need: Triton in its interpreter, Triton as a compiler, FlashInfer's headers."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from .setup import LaneSkippedError, Setup

NEWEST, OLDER = "3.8.0", "3.6.0"  # the older one does not interpret loops with loaded bounds beside numpy 2.4
MEGABYTES = {NEWEST: 248, OLDER: 188}
FLASHINFER = (
    "flashinfer-python==0.7.2.post1",
    "apache-tvm-ffi==0.1.15.post2",
    "nvidia-ml-py==13.615.71",
    "nvidia-curand==10.4.5.25",  # its sources include curand_kernel.h
)
FLASHINFER_MEGABYTES = 142


def _packages(setup: Setup, name: str, packages: tuple[str, ...], megabytes: int) -> Path:
    """A folder with the packages in it, nothing else of them installed; raises LaneSkippedError where that cannot be."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise LaneSkippedError(f"{packages[0]} has wheels for Linux on x86_64 only")
    folder = setup.cache.made("kernels", name)
    stamp = folder / "fastar-stamp.txt"
    wanted = "\n".join(packages)
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return folder
    if setup.offline:
        raise LaneSkippedError(f"{packages[0]} is not there, and --offline")
    setup.talk.say(f"Installing {', '.join(packages)} ({megabytes} MB to download) for the kernel tests.")
    shutil.rmtree(folder)
    command = [str(setup.python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*command, *packages], capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise LaneSkippedError(f"pip could not install {packages[0]}: {done.stderr.strip()[-300:]}")
    stamp.write_text(wanted, encoding="utf-8")
    return folder


def _triton(setup: Setup, version: str) -> str:
    return str(_packages(setup, f"triton-{version}", (f"triton=={version}",), MEGABYTES[version]))


def interpreter_environment(setup: Setup) -> dict[str, str]:
    """Triton's kernels on the CPU, one instruction after the other. More threads make numpy slower here."""
    return {
        "FASTAR_LANE_KIND": "interpreter",
        "FASTAR_KERNEL_BACKENDS": "triton",
        "TRITON_INTERPRET": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": _triton(setup, NEWEST),
    }


def compiler_environment(version: str) -> Callable[[Setup], dict[str, str]]:
    """Triton of this version as a compiler for GPUs that are not there."""

    def prepare(setup: Setup) -> dict[str, str]:
        return {"FASTAR_LANE_KIND": "aot", "PYTHONPATH": _triton(setup, version)}

    return prepare


def flashinfer_environment(setup: Setup) -> dict[str, str]:
    """FlashInfer's sources and nvcc to compile our variant with."""
    home = next((h for h in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if h and Path(h, "bin", "nvcc").is_file()), None)
    if home is None or shutil.which("ninja") is None:
        raise LaneSkippedError("compiling FlashInfer's variant needs nvcc (CUDA_HOME or /usr/local/cuda) and ninja")
    site = _packages(setup, "flashinfer", FLASHINFER, FLASHINFER_MEGABYTES)
    return {
        "FASTAR_LANE_KIND": "flashinfer",
        "PYTHONPATH": str(site),
        "CUDA_HOME": home,
        "CPATH": str(site / "nvidia" / "cu13" / "include"),
        "FLASHINFER_WORKSPACE_BASE": str(setup.cache.made("kernels", "flashinfer-work")),
    }
