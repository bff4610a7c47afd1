"""Reads the frozen runs of reference samplers: weights, draws, calls and results (float32)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from fastar_pack.fastar_core.noise import RecordedRenoise
from fastar_pack.fastar_core.sigmas import SigmaSchedule

HERE = Path(__file__).resolve().parents[1] / "golden"
SHARED = Path(__file__).resolve().parents[3] / "shared" / "golden"
CALL_TOLERANCE = 1e-5
RUN_TOLERANCE = 5e-4


@dataclass
class Golden:
    """One golden file: ``meta`` is its JSON header, ``tensors`` everything but the weights, ``weights`` native Wan keys."""

    meta: dict[str, Any]
    config: str | None
    tensors: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]

    @property
    def schedule(self) -> SigmaSchedule:
        def listed(name: str) -> tuple[float, ...] | None:
            return tuple(self.tensors[name].tolist()) if name in self.tensors else None

        return SigmaSchedule(listed("sigmas") or (), listed("sigmas_first"), listed("timesteps"), listed("timesteps_first"))

    @property
    def renoise(self) -> RecordedRenoise:
        return RecordedRenoise([self.tensors[key] for key in sorted(self.tensors) if key.startswith("renoise.")])

    @property
    def calls(self) -> list[dict[str, Any]]:
        return self.meta["calls"]


def load_golden(name: str) -> Golden:
    """The golden file whose name begins with ``name``; skips by name when neither folder holds it."""
    found = [path for folder in (HERE, SHARED) if folder.is_dir() for path in sorted(folder.glob(f"{name}*.safetensors"))]
    if not found:
        pytest.skip(f"golden file {name} is not here")
    with safe_open(str(found[0]), "pt") as file:
        header = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    weights = {key[len("model."):]: tensors.pop(key) for key in list(tensors) if key.startswith("model.")}
    return Golden(json.loads(header["golden"]), header.get("config"), tensors, weights)
