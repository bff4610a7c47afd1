"""Rolling-Forcing: a window of blocks at staggered noise levels moves over the video (backbones 3.3).

In window w, block b stands at level w - b, so the newest block is pure noise and the oldest of a full window leaves clean. That
rule covers ramp-up, steady state, ramp-down and any number of blocks, fewer than levels too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..context import FwdCtx
from ..geometry import Block, token_grid
from .blockwise import in_chunks, prefill
from .plan import BlockDone, BlockwisePlan, ModelCall


def window_blocks(window: int, num_blocks: int, num_levels: int) -> range:
    """Indices of the blocks inside a window, oldest first."""
    return range(max(0, window - num_levels + 1), min(num_blocks - 1, window) + 1)


def num_windows(num_blocks: int, num_levels: int) -> int:
    """Windows until the last block has left at the last level."""
    return num_blocks + num_levels - 1


def num_rolling_calls(plan: BlockwisePlan) -> int:
    """Model calls of a rolling run, prefill included."""
    levels, blocks = len(plan.schedule.sigmas), len(plan.blocks)
    windows = num_windows(blocks, levels)
    passes = windows if plan.clean_last else sum(_pass_is_read(plan, w) for w in range(windows))
    return plan.num_prefill_calls + windows + passes


def _pass_is_read(plan: BlockwisePlan, window: int) -> bool:
    """Only the pass over a finished block is read later; during ramp-up it is written anew in every window."""
    levels, blocks = len(plan.schedule.sigmas), len(plan.blocks)
    oldest = window_blocks(window, blocks, levels)[0]
    return window - oldest == levels - 1 and oldest + 1 < blocks


def _window_context(plan: BlockwisePlan, members: list[Block], window: int) -> FwdCtx:
    """The prompt is that of the oldest block: a switch leaves every frame before it as it would have been."""
    levels = plan.schedule.for_block(-1)
    sigmas: list[float] = []
    timesteps: list[float] = []
    for block in members:
        sigma, timestep = levels[window - block.index]
        sigmas += [sigma] * block.num_frames
        timesteps += [timestep] * block.num_frames
    rows, cols = token_grid(*plan.noise.shape[3:])
    oldest = members[0]
    return FwdCtx("denoise", oldest.start, len(sigmas), tuple(sigmas), tuple(timesteps), rows, cols, window, oldest.index,
                  plan.prompt_at(oldest.start))


def _renoise(plan: BlockwisePlan, members: list[Block], window: int, x0: torch.Tensor) -> list[torch.Tensor]:
    """The blocks of the window as they enter the next one, a level lower; the finished one is dropped."""
    sigmas = plan.schedule.sigmas
    offset = members[0].start
    noisy = []
    for block in members:
        part = x0[:, :, block.start - offset:block.start - offset + block.num_frames]
        level = window - block.index
        if level + 1 < len(sigmas):
            following = sigmas[level + 1]
            noisy.append((1.0 - following) * part + following * plan.renoise(block.index, level, part))
    return noisy


def run_rolling(call: ModelCall, plan: BlockwisePlan) -> Iterator[BlockDone]:
    """Yields each block when it leaves the window, before its clean pass. ``plan.schedule.sigmas`` are the levels."""
    if plan.prefix is not None:
        prefill(call, plan, in_chunks(plan.prefix, plan.block))
    blocks, num_levels = plan.blocks, len(plan.schedule.sigmas)
    carried: list[torch.Tensor] = []
    for window in range(num_windows(len(blocks), num_levels)):
        members = [blocks[i] for i in window_blocks(window, len(blocks), num_levels)]
        if window < len(blocks):
            start = blocks[window].start
            fresh = plan.noise[:, :, start:start + blocks[window].num_frames]
            carried.append(fresh.to(carried[0].device) if carried else fresh)
        x0 = call(torch.cat(carried, dim=2), _window_context(plan, members, window))
        oldest = members[0]
        level = window - oldest.index
        if plan.on_step is not None:
            plan.on_step(oldest, level, num_levels, x0)
        carried = _renoise(plan, members, window, x0)
        latent = x0[:, :, :oldest.num_frames]
        if level == num_levels - 1:
            yield BlockDone(oldest, latent)
        if plan.clean_last or _pass_is_read(plan, window):
            call(latent, plan.context("clean", oldest.start, oldest.num_frames, 0.0, 0.0, 0, oldest.index))
