"""Starts the attention kernel, dense or over ranges."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from .. import knobs
from ..tiles import TileTable
from . import attention_jit
from .launch import arch, launch, padded_dim
from .shapes import Shape, attend_shape

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
DESCRIPTOR_ARCHS = ("sm_90",)  # on the later ones the tiles of the tables spill with them
DESCRIPTOR_BYTES = 16
MIN_ROWS = 16


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    return_lse: bool,
    lengths: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    tiles: TileTable | None = None,
    shape: Shape | None = None,
    descriptors: bool | None = None,
) -> Result:
    """``order`` and ``tiles`` together make it ranged. ``shape`` and ``descriptors`` are set by measurements only."""
    batch, rows, heads, dim = q.shape
    wide = padded_dim(dim)
    most = 128 if tiles is None else max(MIN_ROWS, triton.next_power_of_2(tiles.tile_rows))
    shape = shape or attend_shape(arch(q.device), q.dtype, wide, most)
    if tiles is not None and shape.rows < most:
        tiles = _split(tiles, shape.rows)
    if tiles is None or tiles.covers_rows:
        out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), None
        if return_lse:
            lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
    else:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = out.new_full((batch, heads, rows), -torch.inf, dtype=torch.float32) if return_lse else None
    table: tuple[Any, ...] = (None,) * 5
    count = triton.cdiv(rows, shape.rows)
    if tiles is not None and order is not None:
        table = (order.contiguous(), tiles.row_start, tiles.row_count, tiles.key_start, tiles.key_end)
        count = tiles.row_start.shape[2]
    wanted = knobs.descriptors() if descriptors is None else descriptors
    desc = wanted and dim == wide and k.shape[1] >= shape.keys and all(_describable(t) for t in (k, v))
    described = tuple(_descriptor(t, shape.keys) for t in (k, v)) if desc else (None, None)
    strides = [s for t in (q, k, v, out) for s in t.stride()[:3]]
    launch(
        attention_jit.attend_kernel, (count, batch * heads), q.device,
        q, k, v, *described, bias, *table, None if lengths is None else lengths.contiguous(), out, lse,
        *strides, *_bias_strides(bias), heads, rows, k.shape[1], count, 0 if tiles is None else tiles.key_start.shape[3],
        math.log2(math.e) / math.sqrt(dim),
        RANGED=tiles is not None, HAS_BIAS=bias is not None, HAS_LENGTHS=lengths is not None, HAS_LSE=return_lse, DESC=desc,
        D=dim, BLOCK_D=wide, BLOCK_M=shape.rows, BLOCK_N=shape.keys, PRECISION=shape.precision,
        **shape.options(),
    )  # fmt: skip
    return out if lse is None else (out, lse)


def _bias_strides(bias: torch.Tensor | None) -> tuple[int, int]:
    if bias is None:
        return 0, 0
    return tuple(0 if bias.shape[axis] == 1 else bias.stride(axis) for axis in (0, 1))  # type: ignore[return-value]


def _split(tiles: TileTable, rows: int) -> TileTable:
    """The same table with every tile cut into tiles of at most ``rows`` rows."""
    parts = triton.cdiv(tiles.tile_rows, rows)
    offset = torch.arange(parts, dtype=torch.int32, device=tiles.row_start.device) * rows
    start = (tiles.row_start[..., None] + offset).flatten(2)
    count = (tiles.row_count[..., None] - offset).clamp(0, rows).flatten(2)
    low, high = (t.repeat_interleave(parts, dim=2) for t in (tiles.key_start, tiles.key_end))
    return TileTable(start, count, low, high, rows, tiles.covers_rows)


def _describable(rows: torch.Tensor) -> bool:
    """Tensor descriptors exist on some GPUs and want addresses and strides that are multiples of 16 bytes."""
    places = [rows.data_ptr(), *(stride * rows.element_size() for stride in rows.stride()[:3])]
    return arch(rows.device) in DESCRIPTOR_ARCHS and all(place % DESCRIPTOR_BYTES == 0 for place in places)


def _descriptor(rows: torch.Tensor, count: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [1, count, 1, rows.shape[3]])
