"""The specialisations of the Triton kernels that real runs use, for compiling them ahead of time."""

from __future__ import annotations

from typing import Any

import torch

from fastar_pack.kernels.triton import (
    attention_jit,
    bucket_order,
    compact,
    hash_codes,
    means_jit,
    merge_lse,
    nearest_candidates,
    prompt_keep,
    rows_jit,
    search_jit,
    tile_table,
)
from fastar_pack.kernels.triton.shapes import Shape, attend_shape, search_shape
from kernels.aot import Variant

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "i8"}
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")


def _ints(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "i32")


def _strides(*tensors: str, axes: str = "bnh") -> tuple[str, ...]:
    return tuple(f"s{tensor}_{axis}" for tensor in tensors for axis in axes)


def attend(
    arch: str, dtype: torch.dtype = torch.bfloat16, dim: int = 128, ranged: bool = True, rows: int = 128,
    bias: bool = True, desc: bool = False, shape: Shape | None = None,
) -> Variant:  # fmt: skip
    """The attention kernel as attention.run starts it on ``arch``."""
    wide = 1 << (dim - 1).bit_length()
    shape = shape or attend_shape(arch, dtype, wide, rows)
    strides = _strides("q", "k", "v", "o")
    types = dict.fromkeys(("q", "k", "v", "out"), f"*{NAMES[dtype]}")
    types |= _ints(*strides, "sb_b", "sb_h", "heads", "rows", "num_keys", "tiles", "ranges")
    types |= {"scale": "fp32", "lse": "*fp32"}
    constants: dict[str, Any] = {
        "RANGED": ranged, "HAS_BIAS": bias, "HAS_LENGTHS": False, "HAS_LSE": True, "DESC": desc, "D": dim, "BLOCK_D": wide,
        "BLOCK_M": shape.rows, "BLOCK_N": shape.keys, "PRECISION": shape.precision, "lengths": None,
    }  # fmt: skip
    table = ("order", "row_start", "row_count", "key_start", "key_end")
    if ranged:
        types |= dict.fromkeys(table, "*i32")
    else:
        constants |= dict.fromkeys(table)
    if bias:
        types["bias"] = "*fp32"
    else:
        constants["bias"] = None
    for name in ("k_desc", "v_desc"):
        if desc:
            types[name] = f"tensordesc<{NAMES[dtype]}[1, {shape.keys}, 1, {wide}]>"
        else:
            constants[name] = None
    tile = f"{shape.rows}x{shape.keys}x{shape.warps}x{shape.stages}"
    marks = f"{' desc' if desc else ''}{'' if bias else ' no bias'}"
    name = f"attend {'ranges' if ranged else 'dense'} {NAMES[dtype]} d{dim} {tile}{marks}"
    return Variant(name, attention_jit.attend_kernel, types, constants, shape.options(), ("q", "k", "v", "out", *strides))


def nearest(arch: str, dtype: torch.dtype = torch.bfloat16, dim: int = 128, metric: int = 1) -> Variant:
    wide = 1 << (dim - 1).bit_length()
    shape = search_shape(arch, dtype, wide)
    strides = _strides("q", "k", axes="bhn")
    types = {"q": f"*{NAMES[dtype]}", "keys": f"*{NAMES[dtype]}", "valid": "*u8", "index": "*i64", "score": "*fp32"}
    types |= _ints(*strides, "heads", "rows", "num_keys")
    constants: dict[str, Any] = {
        "METRIC": metric, "D": dim, "BLOCK_D": wide, "BLOCK_M": shape.rows, "BLOCK_N": shape.keys,
        "PRECISION": shape.precision,
    }  # fmt: skip
    if dtype == torch.int8:
        types |= {"q_scale": "*fp32", "key_scale": "*fp32"}
    else:
        constants |= {"q_scale": None, "key_scale": None}
    name = f"nearest {NAMES[dtype]} d{dim} metric {metric}"
    return Variant(name, search_jit.nearest_kernel, types, constants, shape.options(), ("q", "keys", *strides))


def candidates(arch: str) -> Variant:
    strides = _strides("q", "k", axes="bhn")
    types = {"q": "*bf16", "keys": "*bf16", "candidates": "*i32", "valid": "*u8", "index": "*i64", "score": "*fp32"}
    types |= _ints(*strides, "heads", "rows", "num_keys", "count")
    constants = {
        "METRIC": 1, "D": 128, "BLOCK_D": 128, "BLOCK_M": nearest_candidates.ROWS, "q_scale": None, "key_scale": None,
    }  # fmt: skip
    options = {"num_warps": nearest_candidates.WARPS, "num_stages": 2}
    return Variant(
        "candidates bf16 d128", search_jit.candidates_kernel, types, constants, options, ("q", "keys", *strides), False
    )


def _rows(arch: str) -> list[Variant]:
    """Hash, order, table, prompt pruning."""
    strides = _strides("x", axes="bnh")
    hashing = {"x": "*bf16", "mean": "*fp32", "planes": "*fp32", "codes": "*i32"}
    hashing |= _ints(*strides, "sm_b", "sm_h", "sp_h", "heads", "rows", "bits")
    block = {"BLOCK": 512, "BUCKETS": 16}
    ranges = ("offsets", "key_ranges", "row_start", "row_count", "key_start", "key_end")
    four = {"num_warps": 4}
    kernels = rows_jit
    return [
        Variant(
            "hash bf16 d128", kernels.hash_kernel, hashing, {"D": 128, "BLOCK_D": 128, "BLOCK_M": hash_codes.ROWS}, four,
            ("x", "planes", *strides, "sm_b", "sm_h", "sp_h"), False,
        ),
        Variant("count", kernels.count_kernel, {"codes": "*i32", "counts": "*i32", **_ints("rows", "blocks")}, block, four,
                ("counts",), False),
        Variant(
            "place", kernels.place_kernel,
            {**dict.fromkeys(("codes", "counts", "order", "offsets"), "*i32"), **_ints("rows", "blocks", "buckets")},
            {**block, "MANY": bucket_order.MANY}, four, ("counts",), False,
        ),
        Variant(
            "table", kernels.table_kernel,
            {**dict.fromkeys(ranges, "*i32"), **_ints("buckets", "tiles", "ranges", "tile_rows")},
            {"BUCKETS": 16, "BLOCK": tile_table.BLOCK}, four, (), False,
        ),
        Variant(
            "keep", kernels.keep_kernel,
            {"q_codes": "*i32", "k_codes": "*i32", "kept": "*u8", **_ints("tables", "pairs", "queries", "keys")},
            {"BLOCK_Q": prompt_keep.BLOCK_Q, "BLOCK_K": prompt_keep.BLOCK_K}, four, (), False,
        ),
    ]  # fmt: skip


def _means(arch: str) -> list[Variant]:
    four = {"num_warps": 4}
    moved = {"x": "*bf16", "weight": "*fp32", "order": "*i64", "offsets": "*i32", "mean": "*bf16", "total": "*fp32"}
    moved |= _ints("sx_b", "sx_h", "sx_n", "heads", "rows", "slots")
    strides = _strides("a", "b", "o")
    joined = {"a": "*bf16", "b": "*bf16", "out": "*bf16", "lse_a": "*fp32", "lse_b": "*fp32", "lse": "*fp32"}
    joined |= _ints(*strides, "heads", "rows")
    wide = {"D": 128, "BLOCK_D": 128}
    return [
        Variant("means bf16 d128", means_jit.means_kernel, moved, {**wide, "BLOCK_S": compact.SLOTS}, four,
                ("x", "mean", "sx_b", "sx_h", "sx_n"), False),
        Variant("merge bf16 d128", means_jit.merge_kernel, joined, {**wide, "BLOCK_M": merge_lse.ROWS}, four,
                ("a", "b", "out", *strides), False),
    ]  # fmt: skip


def every_kernel(arch: str) -> list[Variant]:
    """Each kernel once, in the form that a 480p run with bf16 uses."""
    return [attend(arch), nearest(arch), candidates(arch), *_rows(arch), *_means(arch)]


def further(arch: str) -> list[Variant]:
    """More forms of the kernels with matrix products: other dtypes, head dimensions, tiles, and loads by descriptor."""
    half, single = torch.float16, torch.float32
    found = [
        attend(arch, ranged=False),
        attend(arch, rows=64),
        attend(arch, dtype=half, dim=64, bias=False),
        attend(arch, dim=80),
        attend(arch, dim=256),
        attend(arch, dtype=single),
        nearest(arch, dtype=torch.int8),
        nearest(arch, dtype=half, dim=64, metric=2),
        nearest(arch, dtype=single),
        nearest(arch, dim=256, metric=0),
    ]
    return [*found, attend(arch, desc=True)] if arch == "sm_90" else found
