"""The decoded frame that a restarting timeline encodes again (Krea, CausVid): kept on the CPU, encoded when asked for."""

from __future__ import annotations

from typing import Any

import torch

from ...fastar_core.drivers import Restart
from ...fastar_core.errors import FastARError
from .images import encode_prefix


class AnchorFrames:
    """The last decoded frames [B, n, H, W, 3] of a growing video, as many as a restart can ask for."""

    def __init__(self, vae: Any, restart: Restart | None) -> None:
        self.vae = vae
        self.keep = restart.anchor_pixel_from_end if restart is not None and not restart.keep_first else 0
        self.count = 0
        self._tail: torch.Tensor | None = None

    def add(self, frames: torch.Tensor) -> None:
        """Frames in 0..1 as the decoder gives them, surplus included."""
        if not self.keep or not frames.shape[1]:
            return
        self.count += frames.shape[1]
        known = frames if self._tail is None else torch.cat([self._tail, frames], 1)
        self._tail = known[:, -self.keep:].clone()

    def encode(self, number: int) -> torch.Tensor:
        """Pixel frame ``number`` of the video as a clean latent [B, C, 1, h, w] in VAE space on the CPU.

        The model that is sampling may be unloaded by that. Raises FastARError when the frame is not decoded yet, or gone.
        """
        held = 0 if self._tail is None else self._tail.shape[1]
        if self._tail is None or not self.count - held <= number < self.count:
            raise FastARError(f"pixel frame {number} is needed to go on, but the VAE has decoded {self.count} frames and the last "
                              f"{held} are kept; use the Wan 2.1 VAE and blocks of 3 latent frames")
        image = self._tail[:, number - self.count + held]
        return encode_prefix(self.vae, image, image.shape[0])
