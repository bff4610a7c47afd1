"""Running means of keys and values, kept so that nothing is lost by adding to them hundreds of times.

A mean in bfloat16 stalls after some hundred updates. So a row is kept as a high part in the compute type (what attention reads)
and a low part that carries the rest: for bfloat16 the other 16 bits of the float32 number, so the mean is a float32 mean. Or,
for the low-bit history, as two 8-bit planes with one scale per row (16 bits in all); one coding errs by at most 1 / 64516 of the
row's largest number, 750 updates by some 20 times that, which is a tenth of what one coding to 8 bits costs.
"""

from __future__ import annotations

import torch

LEVELS = 127.0
HALF_BITS = 16
FINE = 254.0  # one step of the coarse plane holds 254 steps of the fine one


class _Rows:
    """Rows [B, H, rows, D] held in one or more tensors of that many rows."""

    def tensors(self) -> list[torch.Tensor]:
        raise NotImplementedError

    def clear(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()

    def raw(self, index: torch.Tensor) -> list[torch.Tensor]:
        """What is stored at places [B, H, n, D], part by part. Writing decoded rows back may round them another way."""
        return [torch.gather(t, 2, index[..., :t.shape[-1]]) for t in self.tensors()]

    def restore(self, index: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Puts back what raw() gave."""
        for tensor, part in zip(self.tensors(), parts):
            tensor.scatter_(2, index[..., :tensor.shape[-1]], part)


class MeanRows(_Rows):
    """[B, H, rows, D] in the compute type. ``high`` may be a view into the buffer attention reads. Without ``adds`` the rows only
    ever hold numbers of the compute type, and need no low part."""

    def __init__(self, high: torch.Tensor, adds: bool = True) -> None:
        self.high = high
        kind = torch.int16 if high.dtype == torch.bfloat16 else high.dtype
        exact = high.dtype == torch.float32 or not adds
        self.low = None if exact else torch.zeros(high.shape, dtype=kind, device=high.device)

    def read(self) -> torch.Tensor:
        """float32 [B, H, rows, D]."""
        return _joined(self.high, self.low)

    def write(self, index: torch.Tensor, rows: torch.Tensor) -> None:
        """Rows [B, H, n, D] (float32) to places [B, H, n, D]; equal places must come with equal rows."""
        high, low = _parted(rows, self.high.dtype)
        self.high.scatter_(2, index, high)
        if self.low is not None:
            self.low.scatter_(2, index, low)

    def pick(self, index: torch.Tensor) -> torch.Tensor:
        """float32 rows at places [B, H, n, D]."""
        return _joined(torch.gather(self.high, 2, index), None if self.low is None else torch.gather(self.low, 2, index))

    def tensors(self) -> list[torch.Tensor]:
        return [self.high] if self.low is None else [self.high, self.low]


def _parted(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 rows as high part and low part; a bfloat16 is the upper half of a float32, rounded by the sign of the lower."""
    if dtype != torch.bfloat16:
        high = rows.to(dtype)
        return high, (rows - high.float()).to(dtype)
    bits = rows.contiguous().view(torch.int32)
    low = bits.to(torch.int16)
    return ((bits - low.to(torch.int32)) >> HALF_BITS).to(torch.int16).view(dtype), low


def _joined(high: torch.Tensor, low: torch.Tensor | None) -> torch.Tensor:
    if low is None:
        return high.float()
    if low.dtype != torch.int16:
        return high.float() + low.float()
    return ((high.view(torch.int16).to(torch.int32) << HALF_BITS) + low.to(torch.int32)).view(torch.float32)


class PackedRows(_Rows):
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

    def tensors(self) -> list[torch.Tensor]:
        return [self.coarse, self.fine, self.scale]
