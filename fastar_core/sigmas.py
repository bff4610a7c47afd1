"""Flow-matching schedules of the distilled causal models (backbones: 1.6).

x_t = (1 - sigma) x0 + sigma noise, timestep = 1000 sigma. The reference samplers take their values from a float32 table of
1000 entries; the last bit matters when two implementations are compared, so the same table is built here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from .errors import ConfigError

TRAIN_STEPS = 1000


def training_table(shift: float) -> torch.Tensor:
    """Float32 sigmas sigma_i = s u / (1 + (s - 1) u) of the 1000 training steps, noisiest first, 0 appended."""
    uniform = torch.linspace(1.0, 0.0, TRAIN_STEPS + 1)[:-1]
    return torch.cat([shift * uniform / (1 + (shift - 1) * uniform), torch.zeros(1)])


def warp(raw_steps: tuple[int, ...], shift: float) -> tuple[float, ...]:
    """Sigmas of raw steps (1000 = noisiest) read from the shifted training table."""
    table = training_table(shift)
    for step in raw_steps:
        if not 0 < step <= TRAIN_STEPS:
            raise ConfigError(f"raw step {step} is outside 1..{TRAIN_STEPS}; correct the step list of the preset")
    return tuple(float(table[TRAIN_STEPS - step]) for step in raw_steps)


def nearest_in_table(timestep: float, shift: float) -> float:
    """Sigma of the training-table entry nearest to a timestep: how un-warped lists are read."""
    table = training_table(shift)[:-1]
    return float(table[int((table.double() * TRAIN_STEPS - timestep).abs().argmin())])


def warped_steps(raw_steps: tuple[int, ...], shift: float) -> tuple[tuple[float, ...], tuple[float, ...] | None]:
    """Sigmas of raw steps through the warp, and what the model is told (None = 1000 sigma).

    A last step 0 (Krea) is told as timestep 0, but its sigma is the last entry of the training table: the samplers look a
    sigma up by timestep and find no nearer one.
    """
    if raw_steps[-1] != 0:
        return warp(raw_steps, shift), None
    sigmas = warp(raw_steps[:-1], shift)
    return (*sigmas, nearest_in_table(0.0, shift)), (*(s * TRAIN_STEPS for s in sigmas), 0.0)


@dataclass(frozen=True)
class SigmaSchedule:
    """Denoise sigmas of a block, noisiest first, without a final 0; ``first_block`` replaces them in the first block.

    ``timesteps`` / ``first_timesteps`` are what the model is told; 1000 sigma unless given.
    """

    sigmas: tuple[float, ...]
    first_block: tuple[float, ...] | None = None
    timesteps: tuple[float, ...] | None = None
    first_timesteps: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name, values in (("sigmas", self.sigmas), ("first_block", self.first_block)):
            if values is None:
                continue
            falling = all(a > b for a, b in pairwise(values))
            if not values or not falling or values[0] > 1 or values[-1] <= 0:
                raise ConfigError(f"{name} = {values}: expected at least one value, falling, inside (0, 1]")

    def for_block(self, index: int) -> list[tuple[float, float]]:
        """(sigma, timestep) of every denoise step of generated block ``index``."""
        first = index == 0 and self.first_block is not None
        sigmas = self.first_block if first else self.sigmas
        steps = self.first_timesteps if first else self.timesteps
        return list(zip(sigmas or (), steps or tuple(s * TRAIN_STEPS for s in sigmas or ())))

    @property
    def max_steps(self) -> int:
        return max(len(self.sigmas), len(self.first_block or ()))

    def num_model_calls(self, num_blocks: int, clean_last: bool = False) -> int:
        """Model calls of a run without prefix: all denoise steps and the clean passes between blocks."""
        if num_blocks < 1:
            return 0
        first = len(self.first_block or self.sigmas)
        return first + (num_blocks - 1) * len(self.sigmas) + num_blocks - (not clean_last)
