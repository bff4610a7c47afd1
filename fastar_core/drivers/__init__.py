"""Loops over blocks or windows of latent frames. They know the order of model calls, not who answers them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from .blockwise import num_blockwise_calls, run_blockwise
from .plan import BlockDone, BlockwisePlan, ModelCall, Restart, SolverKind, timeline_frames
from .rolling import num_rolling_calls, num_windows, run_rolling

LoopKind = Literal["blockwise", "rolling"]

__all__ = ["BlockDone", "BlockwisePlan", "LoopKind", "ModelCall", "Restart", "SolverKind", "call_frames", "longest_call",
           "num_model_calls", "num_steps", "run_plan", "timeline_frames"]


def run_plan(kind: LoopKind, call: ModelCall, plan: BlockwisePlan) -> Iterator[BlockDone]:
    """The loop of that kind over the plan."""
    return run_rolling(call, plan) if kind == "rolling" else run_blockwise(call, plan)


def num_model_calls(kind: LoopKind, plan: BlockwisePlan) -> int:
    """Model calls run_plan will make."""
    return num_rolling_calls(plan) if kind == "rolling" else num_blockwise_calls(plan)


def num_steps(kind: LoopKind, plan: BlockwisePlan) -> int:
    """Times the plan's on_step will be called."""
    levels, blocks = len(plan.schedule.sigmas), plan.blocks
    return num_windows(len(blocks), levels) if kind == "rolling" else sum(len(plan.schedule.for_block(b.index)) for b in blocks)


def call_frames(kind: LoopKind, block: int, num_levels: int, recache_frames: int | None) -> int:
    """Latent frames of the longest call of a run that is long enough to make it: a full window, or a recache."""
    return block * num_levels if kind == "rolling" else max(block, recache_frames or 0)


def longest_call(kind: LoopKind, plan: BlockwisePlan) -> int:
    """Latent frames of the longest model call of the plan."""
    recache = None if plan.rebuild else plan.recache_frames
    return min(plan.noise.shape[2], call_frames(kind, plan.block, len(plan.schedule.sigmas), recache))
