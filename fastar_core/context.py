"""The plain host values that describe one model call (design: FwdCtx is set by the driver before every call)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError

Phase = Literal["denoise", "clean", "recache", "prefill"]
PHASES: tuple[Phase, ...] = ("denoise", "clean", "recache", "prefill")


@dataclass(frozen=True)
class FwdCtx:
    """One model call over ``num_frames`` latent frames that begin at latent frame ``start``.

    ``sigmas`` and ``timesteps`` (= 1000 sigma) hold one value per latent frame of the call; ``rows`` x ``cols`` is the
    token grid of one latent frame. ``step`` counts the denoise steps of a block, ``block`` the generated blocks.
    Raises ConfigError when the lengths disagree.
    """

    phase: Phase
    start: int
    num_frames: int
    sigmas: tuple[float, ...]
    timesteps: tuple[float, ...]
    rows: int
    cols: int
    step: int = 0
    block: int = 0
    prompt_id: Hashable = 0

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise ConfigError(f"phase {self.phase!r} is not one of {', '.join(PHASES)}")
        if self.num_frames < 1 or self.start < 0:
            raise ConfigError(f"a call needs start >= 0 and at least one latent frame, got start {self.start}, "
                              f"{self.num_frames} frames")
        if len(self.sigmas) != self.num_frames or len(self.timesteps) != self.num_frames:
            raise ConfigError(f"{self.num_frames} latent frames need as many sigmas and timesteps, got "
                              f"{len(self.sigmas)} and {len(self.timesteps)}")

    @property
    def end(self) -> int:
        """First latent frame after the call."""
        return self.start + self.num_frames

    @property
    def tokens_per_frame(self) -> int:
        return self.rows * self.cols

    @property
    def commits(self) -> bool:
        """Only clean, recache and prefill passes may change the cache."""
        return self.phase != "denoise"

    @property
    def uniform(self) -> bool:
        """True when all frames of the call share one timestep, so that the host's scalar sigma says everything."""
        return len(set(self.timesteps)) == 1
