"""Timings of the ops beside torch's own attention, at the sizes of a 480p block (small ones without a GPU)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fastar_pack.kernels import registry
from fastar_pack.kernels.tiles import TileTable
from gpu.clock import graph_seconds, host_seconds, seconds

DENSITIES = {1.0: 1, 0.25: 4, 0.125: 8}
# query rows, keys, warps, stages per tile: the shapes among which a GPU shall decide
TILES = ((128, 64, 8, 3), (128, 32, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3))
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """A call of attention: rows of the block, cached keys, heads."""

    rows: int
    keys: int
    heads: int
    dim: int = 128

    @property
    def flop(self) -> float:
        return 4.0 * self.rows * self.keys * self.heads * self.dim


def sizes(device: torch.device) -> list[Size]:
    if device.type == "cuda":
        return [Size(4680, 37440, 12), Size(4680, 191880, 12)]
    return [Size(256, 1024, 2, 64)]


def tensors(size: Size, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Fresh random q, k, v and a bias of log counts."""
    q, k, v = (torch.randn(1, n, size.heads, size.dim, device=device).to(dtype) for n in (size.rows, size.keys, size.keys))
    return q, k, v, torch.randint(1, 9, (1, size.heads, size.keys), device=device).float().log()


def bucketed(size: Size, buckets: int, tile: int, device: torch.device, backend: str) -> tuple[torch.Tensor, TileTable]:
    """Random codes in equal shares; a bucket sees an equal share of the keys: density 1 / buckets."""
    codes = torch.randint(0, buckets, (1, size.heads, size.rows), device=device, dtype=torch.int32)
    order, offsets = registry.call("bucket_order", backend, codes, buckets)
    lows = torch.arange(buckets, dtype=torch.int32, device=device) * (size.keys // buckets)
    spans = torch.stack([lows, lows + size.keys // buckets], -1)[None, None, :, None]
    spans = spans.expand(1, size.heads, -1, 1, -1).contiguous()
    return order, registry.call("tile_table", backend, offsets, spans, tile, size.rows)


def executed_flop(tiles: TileTable, size: Size, rows: int, keys: int) -> float:
    """Work of the kernel with whole tiles of ``rows`` x ``keys``, padding included."""
    steps = ((tiles.key_end - tiles.key_start).clamp_min(0) + keys - 1) // keys
    used = (tiles.row_count > 0).to(steps.dtype)[..., None]
    return float((steps * used).sum()) * rows * keys * 4.0 * size.dim


def dense(size: Size, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """torch's attention per kernel, with and without a bias."""
    q, k, v, bias = tensors(size, device, dtype)
    qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
    mask = bias[:, :, None, :].to(dtype)
    kinds = {"flash": (SDPBackend.FLASH_ATTENTION, None), "cudnn": (SDPBackend.CUDNN_ATTENTION, None),
             "efficient with bias": (SDPBackend.EFFICIENT_ATTENTION, mask.expand(-1, -1, size.rows, -1))}  # fmt: skip
    if device.type != "cuda":
        kinds = {"flash": kinds["flash"]}
    for name, (kernel, attn_mask) in kinds.items():
        def call(kernel: Any = kernel, attn_mask: Any = attn_mask) -> None:
            with sdpa_kernel(kernel):
                scaled_dot_product_attention(qt, kt, vt, attn_mask=attn_mask)

        yield measured(f"torch {name}", size, call, device, size.flop)


def measured(name: str, size: Size, call: Callable[[], Any], device: torch.device, flop: float = 0.0, moved: float = 0.0) -> Row:
    """One row; what cannot run here is named, not hidden."""
    row: Row = {"what": name, "rows": size.rows, "keys": size.keys, "heads": size.heads}
    try:
        time = seconds(call, device)
    except (RuntimeError, ValueError) as error:
        return row | {"microseconds": None, "reason": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    row |= {"microseconds": time * 1e6}
    row |= {"tflops": flop / time / 1e12} if flop else {}
    return row | ({"gbps": moved / time / 1e9} if moved else {})


def ours(size: Size, device: torch.device, dtype: torch.dtype, backend: str) -> Iterator[Row]:
    """Dense attention with a bias, and ranges at several densities as a run would call them."""
    q, k, v, bias = tensors(size, device, dtype)
    yield measured(f"{backend} dense with bias", size, lambda: registry.call("attend", backend, q, k, v, bias), device, size.flop)
    for density, buckets in DENSITIES.items():
        order, tiles = bucketed(size, buckets, 128, device, backend)
        work = executed_flop(tiles, size, 128, 64)
        call = lambda order=order, tiles=tiles: registry.call("attend_ranges", backend, q, k, v, bias, order, tiles)  # noqa: E731
        yield measured(f"{backend} ranges, density {density}", size, call, device, work)


def tile_shapes(size: Size, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """The tile shapes and both ways to load keys, at density 0.25; Triton only."""
    from fastar_pack.kernels.triton.attention import run
    from fastar_pack.kernels.triton.shapes import Shape

    q, k, v, bias = tensors(size, device, dtype)
    for rows, keys, warps, stages in TILES:
        order, tiles = bucketed(size, 4, rows, device, "triton")
        shape = Shape(rows, keys, warps, stages, "tf32x3")
        work = executed_flop(tiles, size, rows, keys)
        for desc in (False, True):
            call = functools.partial(run, q, k, v, bias, False, order=order, tiles=tiles, shape=shape, descriptors=desc)
            name = f"triton tile {rows}x{keys}x{warps}x{stages}, {'descriptors' if desc else 'pointers'}"
            yield measured(name, size, call, device, work)


def small_ops(size: Size, device: torch.device, dtype: torch.dtype, backend: str) -> Iterator[Row]:
    """What surrounds attention, alone and as one captured graph, with the host time to start it."""
    x = torch.randn(1, size.rows, size.heads, size.dim, device=device).to(dtype)
    planes = torch.randn(size.heads, size.dim, 3, device=device)
    side = x.transpose(1, 2)
    frame = min(1560, size.rows)
    weight = torch.ones(1, size.heads, size.rows, device=device)
    group = torch.randint(0, size.rows // 2, (1, size.heads, size.rows), device=device)
    spans = torch.zeros(1, size.heads, 8, 4, 2, dtype=torch.int32, device=device)
    lse = torch.randn(1, size.heads, size.rows, device=device)
    codes = registry.call("hash_codes", backend, x, None, planes)
    _, offsets = registry.call("bucket_order", backend, codes, 8)
    element = x.element_size()
    calls: dict[str, tuple[tuple[Any, ...], float]] = {
        "hash_codes": ((x, None, planes), x.numel() * element + 4 * codes.numel()),
        "bucket_order": ((codes, 8), 8 * codes.numel()),
        "tile_table": ((offsets, spans, 128, size.rows), 0),
        "nearest": ((side[:, :, :frame], side[:, :, -frame:], None, "cosine"), 0),
        "compact": ((side, weight, group, size.rows // 2), 1.5 * x.numel() * element),
        "merge_lse": (([(x, lse), (x, lse)],), 3 * x.numel() * element),
    }
    for op, (args, moved) in calls.items():
        yield measured(f"{backend} {op}", size, lambda op=op, args=args: registry.call(op, backend, *args), device, moved=moved)

    def prepare() -> None:
        codes = registry.call("hash_codes", backend, x, None, planes)
        _, offsets = registry.call("bucket_order", backend, codes, 8)
        registry.call("tile_table", backend, offsets, spans, 128, size.rows)

    yield measured(f"{backend} hash, order and table", size, prepare, device)
    row: Row = {"what": f"{backend} the same as one graph", "rows": size.rows, "keys": size.keys, "heads": size.heads}
    graph = graph_seconds(prepare, device) if backend == "triton" else None
    yield row | {"microseconds": None if graph is None else graph * 1e6, "host_microseconds": host_seconds(prepare, device) * 1e6,
                 **({} if graph is not None else {"reason": "CUDA graphs need Triton on a GPU"})}  # fmt: skip
