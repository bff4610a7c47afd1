"""`python tests/bench.py kernels`: errors of every op and back-end, CPU speed beside dense attention, compiled kernels, GPU timings.

The gate is the case table against float64. Ratios on the CPU are interleaved, minimum of the repeats, everything that prepares the
sparse call counted. --aot adds the table of the kernels compiled for GPUs (needs Triton, minutes). With TRITON_INTERPRET=1 the
errors are those of the Triton kernels in their interpreter.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from fastar_pack.kernels import registry
from fastar_pack.kernels.triton import interpreting
from gpu import correct, timing
from kernels.compare import different_bits, relative_error, widened, with_lse
from kernels.more_cases import CASES, Case

Say = Callable[[str], None]
Row = dict[str, Any]
BITS = (1, 2, 3, 4)
KEPT = (0.5, 0.25, 0.1)
NO_GPU = "no CUDA GPU on this machine"
RANGE_TFLOPS, RANGE_KEYS = 430, 37_000
BREAK_EVEN = 0.63  # 4680 queries, 21 cached latent frames, 80 microseconds of preparation, against a dense kernel of 650 TFLOP/s
LAUNCHES = 8
BYTES_PER_SECOND = {"H200": 4.3e12, "H100": 3.0e12}  # what a copy reaches


def largest(op: str, got: Any, want: Any) -> float:
    """The error of a result as one number: relative for floats, the share of different values for decisions."""
    if op == "hash_codes":
        return different_bits(got, want) / max(1, got.numel())
    if op in ("nearest", "nearest_candidates"):
        return float((got[0] != want[0]).float().mean()) if got[0].numel() else 0.0
    if op in ("attend", "attend_ranges", "merge_lse", "compact"):
        return relative_error(got[0], want[0])
    pairs = [(got, want)] if isinstance(got, torch.Tensor) else [(got[0], want[0])] if isinstance(got, tuple) else [
        (got.row_start, want.row_start), (got.key_end, want.key_end)]  # fmt: skip
    return max(float((a != b).float().mean()) if a.numel() else 0.0 for a, b in pairs)


def errors(place: correct.Place) -> list[Row]:
    """Per op, dtype and back-end: the largest error over the case table."""
    table: dict[tuple[str, str, str], float] = {}
    for case in CASES:
        for dtype in correct.DTYPES if case.floating else (torch.float32,):
            if not (case.wide and dtype == torch.float32):
                _note(table, case, dtype, place)
    return [{"op": op, "dtype": kind, "backend": name, "error": value} for (op, kind, name), value in table.items()]


def _note(table: dict[tuple[str, str, str], float], case: Case, dtype: torch.dtype, place: correct.Place) -> None:
    args = case.args(dtype, str(place.device), place.seed)
    want = registry.call(case.op, "reference", *widened(args), **with_lse(case.op, args))
    for name in place.backends:
        key = (case.op, str(dtype)[6:], name)
        got = registry.call(case.op, name, *args, **with_lse(case.op, args))
        table[key] = max(table.get(key, 0.0), largest(case.op, got, want))


class CpuRatios:
    """One problem (heads, queries, keys, head dimension): dense attention, sparse by buckets, and merged keys."""

    def __init__(self, heads: int, rows: int, keys: int, dim: int, dtype: torch.dtype) -> None:
        self.heads, self.rows, self.keys, self.dim = heads, rows, keys, dim
        self.q, self.k, self.v = (torch.randn(1, n, heads, dim).to(dtype) for n in (rows, keys, keys))
        self.planes = torch.randn(heads, dim, max(BITS))

    def dense(self) -> None:
        scaled_dot_product_attention(*(t.transpose(1, 2) for t in (self.q, self.k, self.v)))

    def sorted_keys(self, bits: int) -> tuple[torch.Tensor, ...]:
        """What a run keeps between calls: keys in bucket order, their offsets, the log counts."""
        codes = registry.call("hash_codes", "torch_fast", self.k, None, self.planes[..., :bits].contiguous())
        order, offsets = registry.call("bucket_order", "torch_fast", codes, 2**bits)
        at = order.long().transpose(1, 2)[..., None].expand(-1, -1, -1, self.dim)
        bias = torch.randint(1, 9, (1, self.heads, self.keys)).float().log()
        spans = torch.stack([offsets[..., :-1], offsets[..., 1:]], -1)[:, :, :, None].contiguous()
        return self.k.gather(1, at), self.v.gather(1, at), bias, spans

    def sparse(self, bits: int, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, spans: torch.Tensor) -> None:
        codes = registry.call("hash_codes", "torch_fast", self.q, None, self.planes[..., :bits].contiguous())
        order, offsets = registry.call("bucket_order", "torch_fast", codes, 2**bits)
        tiles = registry.call("tile_table", "torch_fast", offsets, spans, 128, self.rows)
        registry.call("attend_ranges", "torch_fast", self.q, k, v, bias, order, tiles)

    def calls(self) -> dict[str, Callable[[], None]]:
        found: dict[str, Callable[[], None]] = {"dense": self.dense}
        for bits in BITS:
            kept = self.sorted_keys(bits)
            found[f"sparse, {2**bits} buckets"] = lambda bits=bits, kept=kept: self.sparse(bits, *kept)
        for share in KEPT:
            n = int(share * self.keys)
            bias = torch.randint(1, 9, (1, self.heads, n)).float().log()
            k, v = self.k[:, :n].contiguous(), self.v[:, :n].contiguous()
            found[f"merged keys, {share:g} kept"] = lambda k=k, v=v, bias=bias: registry.call("attend", "torch_fast", self.q, k, v, bias)
        return found

    def rows_of(self, repeats: int) -> list[Row]:
        calls = self.calls()
        best = dict.fromkeys(calls, float("inf"))
        for _ in range(repeats + 1):
            for name, call in calls.items():
                begun = time.perf_counter()
                call()
                best[name] = min(best[name], time.perf_counter() - begun)
        size = f"{self.heads} heads, {self.rows} x {self.keys}, d {self.dim}, {str(self.q.dtype)[6:]}"
        return [{"what": name, "size": size, "milliseconds": 1000 * t, "of_dense": t / best["dense"]} for name, t in best.items()]


def compiled(archs: list[str], say: Say) -> list[Row]:
    """Registers, shared memory and spills of every kernel for every target."""
    from kernels import aot, variants

    rows = []
    for arch in archs:
        for variant in variants.every_kernel(arch):
            rows.append(aot.build(variant, arch).row())
            row = rows[-1]
            say(f"  {arch:7s} {row['variant']:44s} {row['registers']:3d} registers, {row['spills']} spills, {row['shared']} B shared")
    return rows


def targets(rows: list[Row], built: list[Row], device: torch.device) -> list[Row]:
    """The targets of the kernels; null where there is no such GPU or nothing was compiled."""
    spills = None if not built else sum(row["spills"] for row in built)
    half = {row["what"]: row for row in rows if row.get("size", "").startswith("4 heads")}
    launches = extra_launches()
    found = [
        _target("spills over all kernels and targets", spills, "0", spills == 0, "run with --aot"),
        *_gpu_targets(rows, device),
        _target("extra launches per layer and step", launches, f"<= {LAUNCHES}", launches <= LAUNCHES, ""),
    ]
    for name, limit in (("sparse, 4 buckets", 0.40), ("merged keys, 0.25 kept", 0.30)):
        value = half[name]["of_dense"] if name in half else None
        found.append(_target(f"CPU: {name}, time of dense", value, f"<= {limit}", value is not None and value <= limit, "left out"))
    return found


def _gpu_targets(rows: list[Row], device: torch.device) -> list[Row]:
    """Those for an H100 or H200."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    speed = next((rate for gpu, rate in BYTES_PER_SECOND.items() if gpu in name), None)
    why = "the targets are for an H100 or H200" if name else NO_GPU
    timed = {row["what"]: row for row in rows if row.get("microseconds") and row["keys"] == timing.sizes(device)[0].keys}
    ranges = [row["tflops"] for what, row in timed.items() if what.startswith("triton ranges")]
    rate = max(ranges) if speed and ranges else None
    found = [_target("range kernel, TFLOP/s of executed work", rate, f">= {RANGE_TFLOPS}", bool(rate and rate >= RANGE_TFLOPS), why)]
    for op in ("hash_codes", "bucket_order", "compact"):
        row = timed.get(f"triton {op}")
        value = speed / 1e9 / row["gbps"] if speed and row else None
        found.append(_target(f"{op}: time over its byte floor", value, "<= 2", bool(value and value <= 2), why))
    value = break_even(timed) if speed else None
    return [*found, _target("break-even density", value, f">= {BREAK_EVEN}", bool(value and value >= BREAK_EVEN), why)]


def break_even(timed: dict[str, Row]) -> float | None:
    """The density at which ranges and what prepares them take as long as torch's dense attention; linear between two."""
    names = ("torch flash", "triton ranges, density 1.0", "triton ranges, density 0.125", "triton hash, order and table")
    if any(name not in timed for name in names):
        return None
    dense, whole, eighth, prepare = (timed[name]["microseconds"] for name in names)
    slope = (whole - eighth) / 0.875
    return float((dense - prepare - (whole - slope)) / slope)


def _target(name: str, value: Any, target: str, holds: bool, reason: str) -> Row:
    if value is None:
        return {"name": name, "value": None, "target": target, "holds": None, "reason": reason}
    return {"name": name, "value": value, "target": target, "holds": holds, "reason": None}


def extra_launches() -> int:
    """Launches that prepare a sparse call of one layer: hash, two for the order, the table. Attention itself replaces a launch."""
    return 1 + 2 + 1


def run(arguments: list[str], say: Say = print) -> dict[str, Any]:
    """The result in the form of the bench."""
    parser = argparse.ArgumentParser(prog="bench.py kernels", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--aot", nargs="*", metavar="ARCH", help="compile for these targets (none named: all)")
    parser.add_argument("--size", default="4,1560,20000,128", help="heads,queries,keys,head dimension of the CPU problem")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="of the CPU problem")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() and not interpreting() else "cpu")
    place = correct.Place(device, correct.backends_for(device, ("triton",) if interpreting() else ()), seed=0)
    checked = [{"check": row["case"], **row} for row in correct.check(place, CASES) if row["fault"]]
    result: dict[str, Any] = {"name": "kernels", "gate": "red" if checked else "green", "rows": checked, "targets": []}
    rows: list[Row] = []
    built: list[Row] = []
    if not checked:
        rows = errors(place)
        for row in rows:
            say(f"  {row['backend']:11s} {row['op']:19s} {row['dtype']:9s} error {row['error']:.1e}")
        rows += _speeds(device, place.backends, options, say)
        if options.aot is not None:
            from kernels.variants import TARGETS

            built = compiled(options.aot or list(TARGETS), say)
    return {**result, "rows": checked + rows + built, "targets": targets(rows, built, device)}


def _speeds(device: torch.device, backends: tuple[str, ...], options: argparse.Namespace, say: Say) -> list[Row]:
    rows: list[Row] = []
    if device.type == "cuda":
        for size in timing.sizes(device):
            rows += timing.dense(size, device, torch.bfloat16)
            for name in backends:
                rows += [*timing.ours(size, device, torch.bfloat16, name), *timing.small_ops(size, device, torch.bfloat16, name)]
        for row in rows:
            say("  " + ", ".join(f"{key} {value}" for key, value in row.items()))
    elif not interpreting():
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        heads, queries, keys, dim = (int(part) for part in options.size.split(","))
        for name in options.dtypes.split(","):
            rows += CpuRatios(heads, queries, keys, dim, getattr(torch, name)).rows_of(options.repeats)
        for row in rows:
            say(f"  {row['size']:40s} {row['what']:24s} {row['milliseconds']:8.1f} ms, {row['of_dense']:.3f} of dense")
    return rows
