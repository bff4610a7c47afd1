"""What a run is, before its first model call: noise, schedule, blocks, prefix, prompts, and how its timeline restarts."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

import torch

from ..context import FwdCtx, Phase
from ..errors import ConfigError, GeometryError
from ..geometry import Block, plan_blocks, prefix_chunks, token_grid
from ..noise import RenoiseSource
from ..sigmas import SigmaSchedule
from ..solvers import RenoiseSolver, Solver, UniPCSolver

ModelCall = Callable[[torch.Tensor, FwdCtx], torch.Tensor]
StepCallback = Callable[[Block, int, int, torch.Tensor], None]
SolverKind = Literal["renoise", "unipc"]


@dataclass
class BlockDone:
    """A finished block: ``latent`` [B, C, n, h, w] in model space holds latent frames start .. start + n - 1."""

    block: Block
    latent: torch.Tensor


@dataclass(frozen=True)
class Restart:
    """A timeline of ``rollout_frames`` latent frames that begins anew, from ``context_frames`` clean ones, when it is full.

    CausVid: 21 and 3. Krea: 6 and 3, so every block but the first two starts over. The first context frame is what
    ``anchor(pixel_frames_from_end)`` returns: that pixel frame of the video so far (1 = the last), encoded, [B, C, 1, h, w] in
    model space; it is the one before those of the other context frames. While (block index - 1) * block < ``context_frames``
    it is the true first latent instead, with ``keep_first`` always.
    """

    rollout_frames: int
    context_frames: int
    anchor_pixel_from_end: int
    anchor: Callable[[int], torch.Tensor] | None = None
    keep_first: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.context_frames < self.rollout_frames:
            raise ConfigError(f"a roll-out of {self.rollout_frames} latent frames cannot start from {self.context_frames} context "
                              "frames; context must be at least 1 and smaller")


def timeline_frames(restart: Restart | None, total_frames: int, prefix_frames: int) -> int:
    """Latent frames a cache has to tell apart: all, or those of one roll-out (and of a prefix, which is fed at once)."""
    return total_frames if restart is None else min(total_frames, max(restart.rollout_frames, prefix_frames))


@dataclass
class BlockwisePlan:
    """Everything a run needs to know beforehand.

    ``noise`` [B, C, T, h, w] covers the whole length; the part under the ``prefix`` [B, C, p, h, w] (clean, model space) is
    ignored. ``prompt_at`` names the prompt of a latent frame; when it changes at a block border, the last ``recache_frames``
    clean latents are run again in the new prompt (None: the cache keeps what it learned under the old one).
    With ``rebuild`` all clean latents of the timeline are run again instead, block by block, and the cache starts from nothing.
    ``clean_last`` also runs the clean passes whose result nothing reads.
    """

    noise: torch.Tensor
    schedule: SigmaSchedule
    block: int
    renoise: RenoiseSource
    prefix: torch.Tensor | None = None
    prompt_at: Callable[[int], Hashable] = lambda frame: 0
    on_step: StepCallback | None = None
    clean_last: bool = False
    recache_frames: int | None = None
    rebuild: bool = False
    restart: Restart | None = None
    solver: SolverKind = "renoise"

    def __post_init__(self) -> None:
        if self.noise.ndim != 5:
            raise GeometryError(f"a video latent has 5 dimensions [batch, channels, frames, height, width], got "
                                f"{tuple(self.noise.shape)}; use an empty video latent")
        if self.prefix is not None:
            want, got = self.noise.shape, self.prefix.shape
            if len(got) != 5 or got[:2] != want[:2] or got[3:] != want[3:]:
                raise GeometryError(f"the clean prefix {tuple(got)} does not fit the video {tuple(want)}; it must have the "
                                    "same batch, channels, height and width")
        if self.restart is not None and self.restart.context_frames + self.block > self.restart.rollout_frames:
            raise ConfigError(f"a block of {self.block} latent frames does not fit behind {self.restart.context_frames} context "
                              f"frames in a roll-out of {self.restart.rollout_frames}; lower the block size")

    @property
    def prefix_frames(self) -> int:
        return 0 if self.prefix is None else self.prefix.shape[2]

    @property
    def blocks(self) -> list[Block]:
        return plan_blocks(self.noise.shape[2], self.block, self.prefix_frames)

    @property
    def timeline_frames(self) -> int:
        """Latent frames that are told apart at most: all, or those of one roll-out."""
        return timeline_frames(self.restart, self.noise.shape[2], self.prefix_frames)

    @property
    def num_prefill_calls(self) -> int:
        return len(prefix_chunks(self.prefix_frames, self.block))

    def make_solver(self, block: Block) -> Solver:
        """A fresh solver for one block."""
        sigmas = [sigma for sigma, _ in self.schedule.for_block(block.index)]
        if self.solver == "unipc":
            return UniPCSolver(sigmas)
        return RenoiseSolver(sigmas, self.renoise, block.index)

    def context(self, phase: Phase, start: int, num_frames: int, sigma: float, timestep: float, step: int = 0,
                block: int = 0, prompt_frame: int | None = None) -> FwdCtx:
        """The FwdCtx of a call in which all frames share one sigma."""
        rows, cols = token_grid(*self.noise.shape[3:])
        prompt_id = self.prompt_at(start if prompt_frame is None else prompt_frame)
        return FwdCtx(phase, start, num_frames, (sigma,) * num_frames, (timestep,) * num_frames, rows, cols, step, block,
                      prompt_id)
