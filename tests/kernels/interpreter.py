"""Makes Triton's interpreter multiply bfloat16 tiles by value: on its own it multiplies their raw 16-bit patterns."""

from __future__ import annotations

from typing import Any


def repair_bf16() -> None:
    """Replaces the interpreter's matrix product for bfloat16 operands; everything else stays as it is."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def values(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle.data
        return (handle.data.astype(np.uint32) << 16).view(np.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if tl.bfloat16 not in (a.dtype.scalar, b.dtype.scalar):
            return plain(self, a, b, d, *options)
        product = np.matmul(values(a), values(b), dtype=d.data.dtype) + d.data
        return interpreter.TensorHandle(product, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
