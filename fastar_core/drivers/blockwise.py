"""The block-by-block sampler of Self-Forcing, Causal-Forcing, LongLive and CausVid (backbones 3.1).

Per block: denoise steps with fresh noise between them, then one pass over the result at t = 0 that leaves clean keys and values
for the blocks that follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Hashable, Iterator

import torch

from ..context import FwdCtx, Phase
from ..errors import GeometryError
from ..geometry import Block, plan_blocks, prefix_chunks, token_grid
from ..noise import RenoiseSource
from ..sigmas import SigmaSchedule

ModelCall = Callable[[torch.Tensor, FwdCtx], torch.Tensor]
StepCallback = Callable[[Block, int, int, torch.Tensor], None]


@dataclass
class BlockDone:
    """A finished block: ``latent`` [B, C, n, h, w] in model space holds latent frames start .. start + n - 1."""

    block: Block
    latent: torch.Tensor


@dataclass
class BlockwisePlan:
    """Everything a block-wise run needs to know beforehand.

    ``noise`` [B, C, T, h, w] covers the whole length; the part under the ``prefix`` [B, C, p, h, w] (clean, model space) is
    ignored. ``prompt_at`` names the prompt of a latent frame. ``clean_last`` also runs the clean pass nothing would follow.
    """

    noise: torch.Tensor
    schedule: SigmaSchedule
    block: int
    renoise: RenoiseSource
    prefix: torch.Tensor | None = None
    prompt_at: Callable[[int], Hashable] = lambda frame: 0
    on_step: StepCallback | None = None
    clean_last: bool = False

    def __post_init__(self) -> None:
        if self.noise.ndim != 5:
            raise GeometryError(f"a video latent has 5 dimensions [batch, channels, frames, height, width], got "
                                f"{tuple(self.noise.shape)}; use an empty video latent")
        if self.prefix is not None:
            want, got = self.noise.shape, self.prefix.shape
            if len(got) != 5 or got[:2] != want[:2] or got[3:] != want[3:]:
                raise GeometryError(f"the clean prefix {tuple(got)} does not fit the video {tuple(want)}; it must have the "
                                    "same batch, channels, height and width")

    @property
    def prefix_frames(self) -> int:
        return 0 if self.prefix is None else self.prefix.shape[2]

    @property
    def blocks(self) -> list[Block]:
        return plan_blocks(self.noise.shape[2], self.block, self.prefix_frames)

    def num_model_calls(self) -> int:
        """Model calls of the whole run, prefill included."""
        chunks = len(prefix_chunks(self.prefix_frames, self.block))
        return chunks + self.schedule.num_model_calls(len(self.blocks), self.clean_last)

    def context(self, phase: Phase, start: int, num_frames: int, sigma: float, timestep: float, step: int = 0,
                block: int = 0, prompt_frame: int | None = None) -> FwdCtx:
        """The FwdCtx of a call in which all frames share one sigma."""
        rows, cols = token_grid(*self.noise.shape[3:])
        prompt_id = self.prompt_at(start if prompt_frame is None else prompt_frame)
        return FwdCtx(phase, start, num_frames, (sigma,) * num_frames, (timestep,) * num_frames, rows, cols, step, block,
                      prompt_id)


def _prefill(call: ModelCall, plan: BlockwisePlan) -> None:
    assert plan.prefix is not None
    for start, count in prefix_chunks(plan.prefix_frames, plan.block):
        call(plan.prefix[:, :, start:start + count], plan.context("prefill", start, count, 0.0, 0.0))


def _denoise(call: ModelCall, plan: BlockwisePlan, block: Block) -> torch.Tensor:
    x = plan.noise[:, :, block.start:block.start + block.num_frames]
    steps = plan.schedule.for_block(block.index)
    for i, (sigma, timestep) in enumerate(steps):
        ctx = plan.context("denoise", block.start, block.num_frames, sigma, timestep, i, block.index)
        x0 = call(x, ctx)
        if plan.on_step is not None:
            plan.on_step(block, i, len(steps), x0)
        if i + 1 < len(steps):
            following = steps[i + 1][0]
            x = (1.0 - following) * x0 + following * plan.renoise(block.index, i, x0)
    return x0


def run_blockwise(call: ModelCall, plan: BlockwisePlan) -> Iterator[BlockDone]:
    """Yields every finished block, before its clean pass: the caller may decode while nothing is pending."""
    if plan.prefix is not None:
        _prefill(call, plan)
    blocks = plan.blocks
    for block in blocks:
        latent = _denoise(call, plan, block)
        yield BlockDone(block, latent)
        if plan.clean_last or block.index + 1 < len(blocks):
            call(latent, plan.context("clean", block.start, block.num_frames, 0.0, 0.0, 0, block.index))
