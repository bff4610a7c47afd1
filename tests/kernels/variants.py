"""The specialisations of the Triton kernels that real runs use, for compiling them ahead of time."""

from __future__ import annotations

import torch

from fastar_pack.kernels.triton import attention_jit
from fastar_pack.kernels.triton.shapes import Shape, attend_shape
from kernels.aot import Variant

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "i8"}
STRIDES = tuple(f"s{tensor}_{axis}" for tensor in "qkvo" for axis in "bnh")


def attend(
    arch: str, dtype: torch.dtype = torch.bfloat16, dim: int = 128, ranged: bool = True, rows: int = 128,
    bias: bool = True, desc: bool = False, shape: Shape | None = None,
) -> Variant:  # fmt: skip
    """The attention kernel as attention.run starts it on ``arch``."""
    wide = 1 << (dim - 1).bit_length()
    shape = shape or attend_shape(arch, dtype, wide, rows)
    pointer = f"*{NAMES[dtype]}"
    types = {name: pointer for name in ("q", "k", "v", "out")} | dict.fromkeys(STRIDES, "i32")
    types |= dict.fromkeys(("sb_b", "sb_h", "heads", "rows", "num_keys", "tiles", "ranges"), "i32")
    types |= {"scale": "fp32", "lse": "*fp32"}
    constants = {
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
    kind = "ranges" if ranged else "dense"
    marks = f"{' desc' if desc else ''}{'' if bias else ' no bias'}"
    name = f"attend {kind} {NAMES[dtype]} d{dim} {shape.rows}x{shape.keys}x{shape.warps}x{shape.stages}{marks}"
    kernel = attention_jit.attend_kernel
    divisible = ("q", "k", "v", "out", *STRIDES)
    return Variant(name, kernel, types, constants, shape.warps, shape.stages, divisible)
