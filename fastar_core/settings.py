"""The settings of a model, as they travel in model_options["transformer_options"]["fastar"]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .annca import AnnCASettings
    from .annsa import AnnSASettings
    from .policies.base import PolicySettings
    from .presets import Preset


@dataclass(frozen=True)
class FastARSettings:
    """What the loader and the patch nodes chose; None means that the sampler decides.

    Copies are the object itself: hosts differ in whether cloning a model copies its options deeply, and a copy that
    compares unequal would look like a change of settings.
    """

    preset: Preset | None = None
    policy: PolicySettings | None = None
    backend: str = "auto"
    annca: AnnCASettings | None = None
    annsa: AnnSASettings | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> FastARSettings:
        return self
