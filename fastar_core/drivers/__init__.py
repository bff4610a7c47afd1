"""Loops over blocks or windows of latent frames. They know the order of model calls, not who answers them."""

from __future__ import annotations

from typing import Iterator, Literal

from .blockwise import num_blockwise_calls, run_blockwise
from .plan import BlockDone, BlockwisePlan, ModelCall, Restart
from .rolling import num_rolling_calls, run_rolling

LoopKind = Literal["blockwise", "rolling"]

__all__ = ["BlockDone", "BlockwisePlan", "LoopKind", "ModelCall", "Restart", "num_model_calls", "run_plan"]


def run_plan(kind: LoopKind, call: ModelCall, plan: BlockwisePlan) -> Iterator[BlockDone]:
    """The loop of that kind over the plan."""
    return run_rolling(call, plan) if kind == "rolling" else run_blockwise(call, plan)


def num_model_calls(kind: LoopKind, plan: BlockwisePlan) -> int:
    """Model calls run_plan will make."""
    return num_rolling_calls(plan) if kind == "rolling" else num_blockwise_calls(plan)
