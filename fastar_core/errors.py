"""Error classes of the pack. Every message names the value, what was expected, and what the user can change."""

from __future__ import annotations


class FastARError(ValueError):
    """Base class: a request that cannot be carried out, explained for the person at the keyboard."""


class ConfigError(FastARError):
    """A setting or a combination of settings is not usable."""


class GeometryError(FastARError):
    """Sizes, frame counts or tensor shapes do not fit together."""


class MemoryPlanError(FastARError):
    """The planned bytes do not fit the memory that is there."""


class UnsupportedError(FastARError):
    """The model, host or input is of a kind that this pack does not handle."""


class CheckpointError(FastARError):
    """A weight file cannot be read or does not hold the expected model."""
