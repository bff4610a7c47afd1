"""What the kernels can do on this machine, in words: for the status node and for one line in the log of a run."""

from __future__ import annotations

import torch

from ..kernels import registry


def summary(backend: str, device: torch.device) -> str:
    """One line: who computes on ``device``, and why the others do not."""
    return registry.summary(backend, device)


def status_table(device: torch.device) -> str:
    """One paragraph per back-end: name, whether it can be used for tensors on ``device``, and what its ops accept."""
    parts = [f"Kernel back-ends for {device.type}, first choice first:"]
    for row in registry.status(device):
        parts.append(f"{row['backend']}: {row['status']}")
        parts += [f"    {line}" for line in row["ops"].splitlines()]
    return "\n".join(parts)


def versions() -> str:
    """torch, CUDA or ROCm, Triton and FlashInfer as far as they are installed, without importing the latter two."""
    from importlib import metadata

    found = [f"torch {torch.__version__}"]
    found += [f"CUDA {torch.version.cuda}"] if torch.version.cuda else []
    found += [f"ROCm {torch.version.hip}"] if torch.version.hip else []
    for package in ("triton", "triton-windows", "flashinfer-python"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)
