"""The demo codec: a linear PCA of 4x8x8x3 patches to 16 channels, so that streamed decoding is trivially exact.

Latent frame 0 is one pixel frame (taken as four equal ones), every later latent frame is four pixel frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PATCH = 8
TIME = 4
CHANNELS = 16


def _patches(frames: Tensor) -> Tensor:
    """Pixel frames [T*4, H, W, 3] -> [T, H/8, W/8, 4*8*8*3]."""
    f, h, w, c = frames.shape
    grid = frames.reshape(f // TIME, TIME, h // PATCH, PATCH, w // PATCH, PATCH, c)
    return grid.permute(0, 2, 4, 1, 3, 5, 6).flatten(3)


@dataclass
class Codec:
    """mean [768], basis [16, 768] with orthonormal rows, and one scale shared by all channels."""

    mean: Tensor
    basis: Tensor
    scale: float

    def encode(self, frames: Tensor) -> Tensor:
        """Pixel frames [1+4(T-1), H, W, 3] in 0..1 -> model-space latent [16, T, H/8, W/8]."""
        whole = torch.cat((frames[:1].expand(TIME - 1, -1, -1, -1), frames))
        return ((_patches(whole) - self.mean) @ self.basis.T / self.scale).permute(3, 0, 1, 2)

    def decode(self, latent: Tensor) -> Tensor:
        """Model-space latent [16, T, h, w] -> pixel frames [1+4(T-1), 8h, 8w, 3], not clamped."""
        _, t, h, w = latent.shape
        flat = latent.permute(1, 2, 3, 0) * self.scale @ self.basis + self.mean
        grid = flat.reshape(t, h, w, TIME, PATCH, PATCH, 3).permute(0, 3, 1, 4, 2, 5, 6)
        return grid.reshape(t * TIME, h * PATCH, w * PATCH, 3)[TIME - 1 :]

    def still(self, picture: Tensor) -> Tensor:
        """One picture [H, W, 3] -> the latent frame [16, H/8, W/8] of four equal pixel frames."""
        return self.encode(picture[None])[:, 0]

    def decibel(self, error: Tensor) -> Tensor:
        """Mean squared latent error -> the PSNR in dB of the pixels it stands for (peak 1)."""
        return -10 * torch.log10(error * (self.scale**2 * CHANNELS / (TIME * PATCH * PATCH * 3)))


def fit(pictures: Tensor) -> Codec:
    """PCA over pictures [N, H, W, 3]; the scale makes the latent's overall standard deviation one."""
    rows = _patches(pictures.repeat_interleave(TIME, 0)).flatten(0, 2).double()
    mean = rows.mean(0)
    covariance = (rows - mean).T @ (rows - mean) / len(rows)
    values, vectors = torch.linalg.eigh(covariance)
    basis = vectors[:, -CHANNELS:].T.flip(0)
    basis = basis * torch.sign(basis.sum(1, keepdim=True) + 1e-12)
    scale = float((values[-CHANNELS:].sum() / CHANNELS).sqrt())
    return Codec(mean.float(), basis.float().contiguous(), scale)
