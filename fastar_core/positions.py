"""Rotary positions in full precision.

Angles come from positions in float64 on the CPU and are cast to float32 once. The host's own position ids live in the
model's dtype and collide past latent frame 256 in bfloat16; these do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .errors import GeometryError

THETA = 10000.0
KEPT_TABLES = 2


@dataclass(frozen=True)
class RopeSpec:
    """How a token at (frame, row, col) is turned into an angle.

    ``scales`` and ``shifts`` are the user's own rope options for (t, y, x): position = shift + scale * index.
    """

    head_dim: int
    theta: float = THETA
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    shifts: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def axes(self) -> tuple[int, int, int]:
        """Channels that belong to time, rows and columns (Wan: d - 4 (d // 6), 2 (d // 6), 2 (d // 6))."""
        spatial = 2 * (self.head_dim // 6)
        temporal = self.head_dim - 2 * spatial
        if self.head_dim % 2 or spatial < 2 or temporal < 2:
            raise GeometryError(f"head dim {self.head_dim} cannot be split over time, rows and columns; "
                                "it must be even and at least 6")
        return temporal, spatial, spatial


class Rotary:
    """Rotates keys and queries [B, frames * rows * cols, heads, head_dim] by their positions."""

    def __init__(self, spec: RopeSpec, rows: int, cols: int) -> None:
        self.spec = spec
        self.rows = rows
        self.cols = cols
        self._spatial = self._spatial_angles()
        self._tables: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def _axis_angles(self, positions: torch.Tensor, axis: int) -> torch.Tensor:
        channels = self.spec.axes()[axis]
        rates = self.spec.theta ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
        scaled = self.spec.shifts[axis] + self.spec.scales[axis] * positions.double()
        return scaled[:, None] * rates[None, :]

    def _spatial_angles(self) -> torch.Tensor:
        y = self._axis_angles(torch.arange(self.rows), 1)[:, None, :].expand(-1, self.cols, -1)
        x = self._axis_angles(torch.arange(self.cols), 2)[None, :, :].expand(self.rows, -1, -1)
        return torch.cat([y, x], dim=-1).reshape(self.rows * self.cols, -1)

    def angles(self, frames: Sequence[float]) -> torch.Tensor:
        """Float64 angles [frames * rows * cols, head_dim / 2] on the CPU."""
        time = self._axis_angles(torch.tensor(list(frames), dtype=torch.float64), 0)
        tokens = self.rows * self.cols
        time = time[:, None, :].expand(-1, tokens, -1)
        space = self._spatial[None].expand(len(time), -1, -1)
        return torch.cat([time, space], dim=-1).reshape(len(time) * tokens, -1)

    def table(self, frames: Sequence[float], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 cos and sin [1, tokens, 1, head_dim / 2]; those of queries and of keys are kept: all layers ask the same."""
        key = (tuple(frames), device)
        if key not in self._tables:
            if len(self._tables) == KEPT_TABLES:
                del self._tables[next(iter(self._tables))]
            angles = self.angles(frames)
            cos, sin = (f(angles).float()[None, :, None, :].to(device) for f in (torch.cos, torch.sin))
            self._tables[key] = (cos, sin)
        return self._tables[key]

    def bytes(self) -> int:
        """Bytes of the tables held."""
        held = [self._spatial, *(t for pair in self._tables.values() for t in pair)]
        return sum(t.numel() * t.element_size() for t in held)

    def rotate(self, x: torch.Tensor, frames: Sequence[float]) -> torch.Tensor:
        """x [B, len(frames) * S, heads, head_dim] rotated to the given temporal positions; computed in float32."""
        cos, sin = self.table(frames, x.device)
        if cos.shape[1] != x.shape[1]:
            raise GeometryError(f"{x.shape[1]} tokens do not match {len(frames)} latent frames of {self.rows} x {self.cols}")
        even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)

    def row_tables(self, steps: torch.Tensor, spatial: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables for rotating single rows: float32 cos and sin [len(steps), 2, d_t / 2] over time, [S, 2, (d - d_t) / 2] over cells.

        ``spatial``: ``steps`` are the positions of frames 0, 1, ...; rows are rotated from nothing. Otherwise ``steps`` are temporal
        moves of keys that are rotated already, and cells stay as they are.
        """
        time = self._axis_angles(steps, 0)
        if not spatial:
            time = time - self._axis_angles(torch.zeros(1), 0)
        space = self._spatial if spatial else torch.zeros_like(self._spatial)
        pair = [torch.stack([torch.cos(a), torch.sin(a)], dim=1).float() for a in (time, space)]
        return pair[0], pair[1]


def rotate_rows(x: torch.Tensor, frame: torch.Tensor, cell: torch.Tensor,
                tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rows x [B, H, N, D] turned each by the table entries of its own frame and cell, both [B, G, N] with G = 1 or H."""
    angles = torch.cat([tables[0][frame], tables[1][cell]], dim=-1)
    cos, sin = angles.unbind(-2)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)
