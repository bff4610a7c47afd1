"""Start images: fitted to the video and encoded to the clean latents it starts with."""

from __future__ import annotations

from typing import Any

import comfy.utils
import torch
from torch import Tensor

from ...fastar_core.errors import GeometryError, UnsupportedError
from ...fastar_core.geometry import PIXEL_FRAMES_PER_LATENT, PIXELS_PER_LATENT, latent_frames_for, pixel_frames_for


def fit_start_image(image: Tensor, width: int, height: int) -> Tensor:
    """image [N, H, W, 3 or 4] in 0..1 -> [N, height, width, 3]: scaled (bilinear) to cover, centre cropped, alpha
    dropped.

    The same as the host's ARVideoI2V does. Raises GeometryError for a tensor that is no IMAGE.
    """
    if image.ndim != 4 or not len(image) or image.shape[3] < 3:
        raise GeometryError(f"start_image has shape {tuple(image.shape)}, expected [images, height, width, 3]; "
                            "connect an IMAGE")
    fitted = comfy.utils.common_upscale(image.movedim(-1, 1), width, height, "bilinear", "center")
    return fitted.movedim(1, -1)[..., :3]


def start_frames(images: int, batch: int) -> tuple[bool, int]:
    """How `images` start images are used: (one per batch row?, prefix latent frames).

    One image starts every row. As many images as batch rows (batch > 1): row i starts with image i. Otherwise they
    are the first frames of the video, the same for every row, and must fill whole latent frames: 1, 5, 9, 13 ... (1 +
    4 per further latent frame). Raises GeometryError for other counts.
    """
    if images == 1 or (batch > 1 and images == batch):
        return images > 1, 1
    if (images - 1) % PIXEL_FRAMES_PER_LATENT:
        upper = latent_frames_for(images)
        fits = f"{pixel_frames_for(upper - 1)} or {pixel_frames_for(upper)}"
        rows = f", 1 for all or {batch} (one per row of the batch)" if batch > 1 else ""
        raise GeometryError(f"start_image has {images} images, which do not fill whole latent frames; give {fits} as "
                            f"the first frames of the video{rows}, or a single image")
    return False, latent_frames_for(images)


def encode_prefix(vae: Any, images: Tensor, batch: int) -> Tensor:
    """images [N, H, W, 3], already fitted -> latent [batch, C, p, H / 8, W / 8] in VAE space on the CPU.

    start_frames() says what N means. The VAE is used through its stock encode, one video or image at a time; the
    model that is sampling may be unloaded by that. Raises UnsupportedError when the result is not a video latent of
    the right size.
    """
    one_per_row, latents = start_frames(len(images), batch)
    if one_per_row:
        coded = torch.cat([_encode(vae, image[None], 1) for image in images])
    else:
        coded = _encode(vae, images, latents).expand(batch, -1, -1, -1, -1)
    return coded.contiguous()


def _encode(vae: Any, frames: Tensor, latents: int) -> Tensor:
    coded = vae.encode(frames[..., :3]).float().cpu()
    height, width = frames.shape[1] // PIXELS_PER_LATENT, frames.shape[2] // PIXELS_PER_LATENT
    if coded.ndim != 5 or tuple(coded.shape[2:]) != (latents, height, width):
        raise UnsupportedError(f"the VAE encoded {tuple(frames.shape)} start frames to {tuple(coded.shape)}, "
                               f"expected [1, channels, {latents}, {height}, {width}]; connect the VAE that belongs "
                               "to the model (Wan 2.1 VAE)")
    return coded
