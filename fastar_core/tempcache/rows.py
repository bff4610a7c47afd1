"""Running means of keys and values, kept so that nothing is lost by adding to them hundreds of times.

A mean in bfloat16 stalls after some hundred updates. So a row is kept as a high part in the compute type (what attention reads)
and a low part that carries the rest; or, for the low-bit history, as two 8-bit planes with one scale per row (16 bits in all).
"""

from __future__ import annotations

import torch

LEVELS = 127.0
FINE = 254.0  # one step of the coarse plane holds 254 steps of the fine one


class MeanRows:
    """[B, H, rows, D] in the compute type. ``high`` may be a view into the buffer attention reads."""

    def __init__(self, high: torch.Tensor) -> None:
        self.high = high
        self.low = None if high.dtype == torch.float32 else torch.zeros(high.shape, dtype=high.dtype, device=high.device)

    def read(self) -> torch.Tensor:
        """float32 [B, H, rows, D]."""
        return self.high.float() if self.low is None else self.high.float() + self.low.float()

    def write(self, index: torch.Tensor, rows: torch.Tensor) -> None:
        """Rows [B, H, n, D] (float32) to places [B, H, n, D]; equal places must come with equal rows."""
        high = rows.to(self.high.dtype)
        self.high.scatter_(2, index, high)
        if self.low is not None:
            self.low.scatter_(2, index, (rows - high.float()).to(self.low.dtype))

    def pick(self, index: torch.Tensor) -> torch.Tensor:
        """float32 rows at places [B, H, n, D]."""
        high = torch.gather(self.high, 2, index).float()
        return high if self.low is None else high + torch.gather(self.low, 2, index).float()

    def clear(self) -> None:
        self.high.zero_()
        if self.low is not None:
            self.low.zero_()

    def tensors(self) -> list[torch.Tensor]:
        return [self.high] if self.low is None else [self.high, self.low]


class PackedRows:
    """[B, H, rows, D] as coarse and fine 8-bit planes and a float32 scale per row; a row is only coded when it changes."""

    def __init__(self, like: torch.Tensor) -> None:
        self.dtype = like.dtype
        self.coarse = torch.zeros(like.shape, dtype=torch.int8, device=like.device)
        self.fine = torch.zeros_like(self.coarse)
        self.scale = torch.zeros((*like.shape[:3], 1), dtype=torch.float32, device=like.device)

    def read(self) -> torch.Tensor:
        return (self.coarse.float() + self.fine.float() / FINE) * self.scale

    def write(self, index: torch.Tensor, rows: torch.Tensor) -> None:
        scale = rows.abs().amax(-1, keepdim=True) / LEVELS
        unit = rows / scale.clamp_min(1e-30)
        coarse = unit.round().clamp(-LEVELS, LEVELS)
        fine = ((unit - coarse) * FINE).round().clamp(-LEVELS, LEVELS)
        self.coarse.scatter_(2, index, coarse.to(torch.int8))
        self.fine.scatter_(2, index, fine.to(torch.int8))
        self.scale.scatter_(2, index[..., :1], scale)

    def pick(self, index: torch.Tensor) -> torch.Tensor:
        unit = torch.gather(self.coarse, 2, index).float() + torch.gather(self.fine, 2, index).float() / FINE
        return unit * torch.gather(self.scale, 2, index[..., :1])

    def clear(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()

    def tensors(self) -> list[torch.Tensor]:
        return [self.coarse, self.fine, self.scale]
