"""How results of an op are compared: floats by relative error, decisions by the share of equal ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Relative error (norm of the difference over norm of the reference) that rounding of the inputs' dtype may cause.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.float16: 1.2e-3, torch.bfloat16: 6e-3}
# Decisions at the border may flip by rounding in the last place: out of a hundred thousand, not out of a hundred.
FLIPS = 1e-3
FEW = 50  # in fewer decisions than this none may flip


def allowed_flips(decisions: int) -> int:
    return max(1, int(FLIPS * decisions)) if decisions >= FEW else 0


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over norm of the reference; infinite for NaN or wrong infinities."""
    got, want = got.detach().double().cpu(), want.detach().double().cpu()
    if got.numel() == 0:
        return 0.0
    same = (got == want) | (got.isinf() & want.isinf() & (got.sign() == want.sign()))
    difference = torch.where(same, 0, got - want)
    if not bool(difference.isfinite().all()):
        return float("inf")
    size = torch.where(want.isfinite(), want, 0).norm()
    return float(difference.norm() / size.clamp_min(1e-30))


def float_fault(what: str, got: Tensor, want: Tensor, limit: float) -> str | None:
    if got.shape != want.shape:
        return f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    error = relative_error(got, want)
    return None if error <= limit else f"{what}: relative error {error:.2e}, limit {limit:.1e}"


def integer_fault(what: str, got: Tensor, want: Tensor) -> str | None:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{what}: {got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}"
    wrong = int((got.cpu() != want.cpu()).sum())
    return None if wrong == 0 else f"{what}: {wrong} of {got.numel()} values differ"


def different_bits(got: Tensor, want: Tensor, bits: int = 31) -> int:
    """Number of hash bits that differ."""
    difference = got.cpu() ^ want.cpu()
    return sum(int(((difference >> bit) & 1).sum()) for bit in range(bits))


def _hash_fault(got: Tensor, want: Tensor, bits: int) -> str | None:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"codes: {got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}"
    flips = different_bits(got, want)
    total = got.numel() * bits
    return None if flips <= allowed_flips(total) else f"codes: {flips} of {total} bits differ"


def _search_fault(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], limit: float) -> str | None:
    """Scores agree; indices agree except where two keys are equally good up to rounding."""
    index, score = (t.cpu() for t in got)
    best, top = (t.cpu() for t in want)
    if index.dtype != torch.int64 or index.shape != best.shape:
        return f"index: {index.dtype} {tuple(index.shape)}, expected int64 {tuple(best.shape)}"
    if not torch.equal(index < 0, best < 0):
        return "index: -1 in the wrong places"
    flips = int((index != best).sum())
    if flips > allowed_flips(index.numel()):
        return f"index: {flips} of {index.numel()} differ"
    return float_fault("score", score, top, limit)


def _tiles_fault(got: Any, want: Any) -> str | None:
    faults = (
        integer_fault(name, getattr(got, name), getattr(want, name))
        for name in ("row_start", "row_count", "key_start", "key_end")
    )
    return next((fault for fault in faults if fault), None)


def fault(op: str, args: tuple[Any, ...], got: Any, want: Any, limit: float) -> str | None:
    """What is wrong with ``got`` in words, or None. ``limit`` is the relative error allowed for floats."""
    if op in ("attend", "attend_ranges", "merge_lse"):
        return float_fault("out", got[0], want[0], limit) or float_fault("lse", got[1], want[1], min(limit, 1e-3))
    if op == "compact":
        return float_fault("mean", got[0], want[0], limit) or float_fault("sums", got[1], want[1], 1e-6)
    if op == "hash_codes":
        return _hash_fault(got, want, args[2].shape[2])
    if op in ("nearest", "nearest_candidates"):
        return _search_fault(got, want, max(1e-5, 0.02 * limit))
    if op == "bucket_order":
        return integer_fault("order", got[0], want[0]) or integer_fault("offsets", got[1], want[1])
    if op == "tile_table":
        return _tiles_fault(got, want)
    return integer_fault("kept", got, want)


def with_lse(op: str, args: tuple[Any, ...]) -> dict[str, Any]:
    """Keyword arguments that make an attention op return its log sum too."""
    return {"return_lse": True} if op in ("attend", "attend_ranges") else {}


def widened(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same values in float64 where they are of a half type, so that the reference returns unrounded results."""
    half = (torch.float16, torch.bfloat16)
    wide: list[Any] = []
    for value in args:
        if isinstance(value, list | tuple):
            wide.append([widened(tuple(part)) for part in value])
        else:
            wide.append(value.double() if isinstance(value, Tensor) and value.dtype in half else value)
    return tuple(wide)
