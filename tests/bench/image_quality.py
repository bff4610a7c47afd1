"""PSNR and SSIM of pictures in 0..1; SSIM with the usual gaussian window of 11 pixels (sigma 1.5)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

WINDOW, SIGMA, C1, C2 = 11, 1.5, 0.01**2, 0.03**2


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    """dB; equal pictures give 100."""
    return float(-10 * torch.log10((a - b).square().mean().clamp_min(1e-10)))


def ssim(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean structural similarity of [N, H, W, 3]."""
    axis = torch.arange(WINDOW, dtype=torch.float32) - WINDOW // 2
    line = torch.exp(-axis.square() / (2 * SIGMA**2))
    kernel = (line[:, None] * line[None] / line.sum() ** 2)[None, None]
    x, y = (t.permute(0, 3, 1, 2).reshape(-1, 1, *t.shape[1:3]) for t in (a, b))

    def blur(t: torch.Tensor) -> torch.Tensor:
        return F.conv2d(t, kernel)

    mx, my = blur(x), blur(y)
    vx, vy, cov = blur(x * x) - mx * mx, blur(y * y) - my * my, blur(x * y) - mx * my
    score = ((2 * mx * my + C1) * (2 * cov + C2)) / ((mx * mx + my * my + C1) * (vx + vy + C2))
    return float(score.mean())
