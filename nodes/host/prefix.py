"""The clean latents a video starts with: given as LATENT, encoded from images, or set by the stock AR I2V node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...fastar_core.errors import ConfigError, GeometryError
from ...fastar_core.stream_choice import Canvas
from .images import encode_prefix, fit_start_image


def find_prefix(start_latent: Any, start_image: torch.Tensor | None, options: Mapping[str, Any], vae: Any,
                canvas: Canvas) -> torch.Tensor | None:
    """Clean latents [B, 16, p, h, w] in VAE space on the CPU, or None. One row is repeated over the batch of ``canvas``.

    Raises ConfigError when both inputs are given, GeometryError when sizes do not fit.
    """
    if start_latent is not None and start_image is not None:
        raise ConfigError("start_latent and start_image are both connected; disconnect one, each gives the first "
                          "frames")
    if start_latent is not None:
        samples, name = start_latent["samples"], "start_latent"
    elif start_image is not None:
        samples = encode_prefix(vae, fit_start_image(start_image, canvas.width, canvas.height), canvas.batch)
        name = "start_image"
    else:
        samples, name = (options.get("ar_config") or {}).get("initial_latent"), "the start image of ARVideoI2V"
        if samples is None:
            return None
    return _fitted(samples, name, canvas)


def _fitted(samples: Any, name: str, canvas: Canvas) -> torch.Tensor:
    if getattr(samples, "is_nested", False) or samples.ndim != 5:
        raise GeometryError(f"{name} has shape {tuple(samples.shape)}, expected a video latent of 5 dimensions [batch, 16, "
                            "frames, height, width]; encode it with the Wan VAE")
    want, got = canvas.latent_shape, tuple(samples.shape)
    if got[1] != want[1]:
        raise GeometryError(f"{name} has {got[1]} channels, expected {want[1]}; encode it with the Wan 2.1 VAE")
    if got[3:] != want[3:]:
        raise GeometryError(f"{name} is {got[4]} x {got[3]} latent pixels, the video {want[4]} x {want[3]}; set width to "
                            f"{got[4] * 8} and height to {got[3] * 8}")
    if got[2] < 1:
        raise GeometryError(f"{name} holds no frame; give at least one latent frame or disconnect it")
    rows = got[0] if canvas.batch == 1 else canvas.batch
    if got[0] not in (1, rows):
        raise GeometryError(f"{name} has {got[0]} rows, batch_size is {canvas.batch}; give one row, or one for each "
                            "video")
    return samples.detach().float().cpu().expand(rows, *got[1:]).contiguous()
