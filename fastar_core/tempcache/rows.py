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


def row_places(slot: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows ``slot`` [B, G, N] (G = heads, or 1 for all heads) as an index of the first three axes of [B, H, rows, D].

    Whole rows are copied that way, in a third of the time of a gather with an index per number.
    """
    batch = torch.arange(slot.shape[0], device=slot.device)[:, None, None]
    head = torch.arange(heads, device=slot.device)[None, :, None]
    return batch, head, slot.expand(-1, heads, -1)


class _Rows:
    """Rows [B, H, rows, D] held in one or more tensors of that many rows; places are row numbers [B, H or 1, n]."""

    def _at(self, slot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return row_places(slot, self.tensors()[0].shape[1])

    def tensors(self) -> list[torch.Tensor]:
        raise NotImplementedError

    def clear(self) -> None:
        for tensor in self.tensors():
            tensor.zero_()

    def raw(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """What is stored there, part by part. Writing decoded rows back may round them another way."""
        at = self._at(slot)
        return [t[at] for t in self.tensors()]

    def restore(self, slot: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Puts back what raw() gave."""
        at = self._at(slot)
        for tensor, part in zip(self.tensors(), parts):
            tensor[at] = part


class MeanRows(_Rows):
    """[B, H, rows, D] in the compute type. ``high`` may be a view into the buffer attention reads. Without ``adds`` the rows only
    ever hold numbers of the compute type, and need no low part."""

    def __init__(self, high: torch.Tensor, adds: bool = True) -> None:
        self.high = high
        kind = torch.int16 if high.dtype == torch.bfloat16 else high.dtype
        exact = high.dtype == torch.float32 or not adds
        self.low = None if exact else torch.zeros(high.shape, dtype=kind, device=high.device)

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """float32 [B, H, rows, D], or the rows from ``start`` up to ``stop``."""
        part = slice(start, stop)
        return _joined(self.high[:, :, part], None if self.low is None else self.low[:, :, part])

    def write(self, slot: torch.Tensor, rows: torch.Tensor) -> None:
        """Rows [B, H, n, D] (float32) to their places; equal places must come with equal rows."""
        at = self._at(slot)
        if self.low is None:
            self.high[at] = rows.to(self.high.dtype)
        else:
            self.high[at], self.low[at] = _parted(rows, self.high.dtype)

    def pick(self, slot: torch.Tensor) -> torch.Tensor:
        """float32 rows [B, H, n, D] from their places."""
        at = self._at(slot)
        return _joined(self.high[at], None if self.low is None else self.low[at])

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

    def read(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        part = slice(start, stop)
        return (self.coarse[:, :, part].float() + self.fine[:, :, part].float() / FINE) * self.scale[:, :, part]

    def write(self, slot: torch.Tensor, rows: torch.Tensor) -> None:
        scale = rows.abs().amax(-1, keepdim=True) / LEVELS
        unit = rows / scale.clamp_min(1e-30)
        coarse = unit.round().clamp(-LEVELS, LEVELS)
        fine = ((unit - coarse) * FINE).round().clamp(-LEVELS, LEVELS)
        at = self._at(slot)
        self.coarse[at] = coarse.to(torch.int8)
        self.fine[at] = fine.to(torch.int8)
        self.scale[at] = scale

    def pick(self, slot: torch.Tensor) -> torch.Tensor:
        at = self._at(slot)
        return (self.coarse[at].float() + self.fine[at].float() / FINE) * self.scale[at]

    def tensors(self) -> list[torch.Tensor]:
        return [self.coarse, self.fine, self.scale]
