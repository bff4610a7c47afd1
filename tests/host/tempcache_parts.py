"""The TempCache node with short defaults, for the tests of this folder."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastar_pack.fastar_core.policies import PolicySettings
from tests_support import Host

ALL: dict[str, Any] = {"budget": 60, "threshold": 1.01}
MERGING: dict[str, Any] = {"budget": 9}
SAME, OTHER = 2e-4, 1e-2  # values reach 10


def patch(host: Host, model: Any, preset: str = "balanced", budget: int = 0, memory_gb: float = 0.0, **more: Any) -> tuple[Any, str]:
    return host.nodes["FastARTempCache"]().patch(model, preset, budget, memory_gb, **more)


def policy_of(model: Any) -> PolicySettings:
    return model.model_options["transformer_options"]["fastar"].policy


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
