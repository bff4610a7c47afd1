"""`python tests/bench.py attention`: CPU time of bucketed attention against dense, and of merged prompt rows.

Gate: the sparse path at density 1 and the pad merge equal dense attention.
Times are CPU seconds, interleaved, the minimum of the repeats counts;
a sparse time holds the queries' hash, sort, gather and scatter and the bias of counts; keys are sorted once per block, so not in it.
Also timed: the whole AnnSA call (k-means buckets, choosing included) beside what the cost rule predicts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.kernels import BITS, CpuRatios
from fastar_pack.fastar_core.annca import AnnCASettings, PromptPruner
from fastar_pack.fastar_core.annca.pruner import PromptCall
from fastar_pack.fastar_core.annsa import AnnSASettings, SparseAttention
from fastar_pack.fastar_core.annsa.cost import CallSize, predicted_times
from fastar_pack.fastar_core.attention import Attention
from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.key_rows import KeyRows
from fastar_pack.kernels import registry

ROWS, KEYS, DIM = 1560, 20_000, 128
LIMITS = {1: (0.5, 0.65), 2: (0.25, 0.34), 3: (0.125, 0.20), 4: (0.065, 0.14)}
TOLERANCE = 1e-5
PROMPT_ROWS, WORDS = 512, 100
SCHEDULE = (1.0, 0.9375, 5 / 6, 0.625)
Row = dict[str, Any]


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return registry.call("attend", "torch_fast", q, k, v, bias)


class WholeCall:
    """One AnnSA call as a run makes it: sorted keys from the step before, everything else anew."""

    def __init__(self, heads: int, rows: int, keys: int, density: float) -> None:
        self.q, self.k, self.v = (torch.randn(1, n, heads, DIM) for n in (rows, keys, keys))
        settings = AnnSASettings(density, only_if_faster=False, balance="layer")
        self.sparse = SparseAttention(settings, SCHEDULE, "torch_fast")
        ctx = FwdCtx("denoise", 1, 1, (0.625,), (625.0,), 1, rows, 1, 1)
        self.rows = KeyRows(0, ctx, "bench", ((0, keys - rows, None), (keys - rows, rows, 1)), 0)
        self.sparse.start_call(0, False)
        self.size = CallSize(rows, keys, heads, DIM, settings.queries_in(rows, "cpu"), settings.key_buckets)

    def __call__(self) -> torch.Tensor:
        out = self.sparse.attend(self.q, self.k, self.v, None, self.rows, dense)
        assert out is not None
        return out

    def dense(self) -> torch.Tensor:
        return dense(self.q, self.k, self.v)


class PromptCalls:
    """Text attention of ``rows`` queries with a padded prompt: as it is, and with its equal rows merged."""

    def __init__(self, heads: int, rows: int) -> None:
        context = torch.zeros(1, PROMPT_ROWS, 32)
        context[:, :WORDS] = torch.randn(1, WORDS, 32)
        maps = torch.randn(2, 32, heads * DIM) / 32**0.5
        self.q = torch.randn(1, rows, heads, DIM)
        self.k, self.v = ((context @ m).unflatten(-1, (heads, DIM)) for m in maps)
        self.pruner = PromptPruner(AnnCASettings(), Attention("torch_fast"), SCHEDULE)
        self.pruner.start_call(context, ["prompt"], PromptCall(0.625, 1, 0))

    def dense(self) -> torch.Tensor:
        return dense(self.q, self.k, self.v)

    def merged(self) -> torch.Tensor:
        out = self.pruner.attend(0, self.q, self.k, self.v)
        assert out is not None
        return out


def check() -> list[Row]:
    """Largest differences from dense at density 1, and of the pad merge."""
    whole = WholeCall(2, 96, 700, 1.0)
    prompts = PromptCalls(2, 96)
    return [{"check": "AnnSA at density 1", "error": float((whole() - whole.dense()).abs().max())},
            {"check": "pad merge", "error": float((prompts.merged() - prompts.dense()).abs().max())}]


def fastest(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """CPU seconds of each call (a busy machine hardly changes them), interleaved, the minimum of the repeats."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(repeats + 1):
        for name, call in calls.items():
            begun = time.process_time()
            call()
            best[name] = min(best[name], time.process_time() - begun)
    return best


def bucket_rows(heads: int, repeats: int) -> list[Row]:
    """Sorted ranges of 2, 4, 8 and 16 hash buckets against dense."""
    problem = CpuRatios(heads, ROWS, KEYS, DIM, torch.float32)
    calls: dict[str, Callable[[], Any]] = {"dense": problem.dense}
    densities = {}
    for bits in BITS:
        kept = problem.sorted_keys(bits)
        calls[str(bits)] = lambda bits=bits, kept=kept: problem.sparse(bits, *kept)
        codes = registry.call("hash_codes", "torch_fast", problem.q, None, problem.planes[..., :bits].contiguous())
        sizes = (kept[3][..., 0, 1] - kept[3][..., 0, 0]).float()
        densities[bits] = float(torch.gather(sizes, 2, codes.long()).mean() / KEYS)
    best = fastest(calls, repeats)
    return [{"what": "hash buckets", "bits": bits, "density": densities[bits], "of_dense": best[str(bits)] / best["dense"],
             "milliseconds": 1000 * best[str(bits)]} for bits in BITS]


def whole_rows(heads: int, repeats: int) -> list[Row]:
    """The whole AnnSA call against dense, and the cost rule's opinion."""
    rows = []
    for density in (0.28, 0.15):
        call = WholeCall(heads, ROWS, KEYS, density)
        best = fastest({"dense": call.dense, "sparse": call}, repeats)
        told = predicted_times(call.size, density, "cpu")
        rows.append({"what": "AnnSA, k-means", "density": density, "of_dense": best["sparse"] / best["dense"],
                     "milliseconds": 1000 * best["sparse"], "predicted_of_dense": told[1] / told[0]})
    return rows


def targets(rows: list[Row]) -> list[Row]:
    found = []
    by_bits = {row["bits"]: row for row in rows if row["what"] == "hash buckets"}
    for bits, (density, limit) in LIMITS.items():
        value = by_bits[bits]["of_dense"]
        found.append({"name": f"CPU time of bucketed attention / dense at density {density:g}", "value": value, "target": f"<= {limit}",
                      "holds": value <= limit, "reason": None})
    return found


def run(arguments: list[str], say: Callable[[str], None] = print) -> dict[str, Any]:
    """Prints the table; returns {name, gate, rows, targets}."""
    parser = argparse.ArgumentParser(prog="bench.py attention")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    checked = check()
    gate = "green" if all(row["error"] <= TOLERANCE for row in checked) else "red"
    names = targets([{"what": "hash buckets", "bits": bits, "of_dense": 0.0} for bits in BITS])
    if gate == "red":
        return {"name": "attention", "gate": gate, "rows": checked, "targets": names}
    rows = bucket_rows(options.heads, options.repeats) + whole_rows(options.heads, options.repeats)
    prompts = PromptCalls(options.heads, ROWS)
    best = fastest({"dense": prompts.dense, "merged": prompts.merged}, options.repeats)
    rows.append({"what": f"text attention, {PROMPT_ROWS} rows merged to {WORDS + 1}", "of_dense": best["merged"] / best["dense"],
                 "milliseconds": 1000 * best["merged"]})
    for row in rows:
        say("  ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))
    return {"name": "attention", "gate": gate, "rows": checked + rows, "targets": targets(rows)}
