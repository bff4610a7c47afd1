"""`python tests/bench.py rollout`: speed of the cache policies over a 750-frame rollout, every layer full to its budget (worst case).

Random weights, 256 tokens per latent frame. One block is timed at several cache lengths, policies interleaved, minimum of the
repeats; the rollout is the trapezoid over the lengths. All model calls and all work of the policy count, the VAE does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from bench.speed_engine import Shape, SpeedEngine
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.tempcache.plan import PRESETS
from fastar_pack.fastar_core.tempcache.settings import TempCacheSettings
from tiny.weights import random_weights

LENGTHS = (21, 60, 120, 240, 480, 750)
SINK, STOCK_WINDOW = 1, 21
TEXT_DIM = 64
DENSE = "dense unbounded"


def policies(block: int) -> dict[str, PolicySettings]:
    """Dense, stock bounded, the three presets, and the bounded window of equal rows for the balanced one."""
    def window(frames: float) -> PolicySettings:
        return PolicySettings(kind="sink_window", window_frames=int(frames), sink_frames=SINK)

    def merged(settings: TempCacheSettings) -> PolicySettings:
        return PolicySettings(kind="tempcache", sink_frames=SINK, tempcache=settings)

    return {DENSE: PolicySettings(), f"stock bounded {STOCK_WINDOW}": window(STOCK_WINDOW),
            "bounded, equal budget": window(PRESETS["balanced"].budget_frames + block),
            **{f"tempcache {name}": merged(settings) for name, settings in PRESETS.items()}}


def measure(shape: Shape, lengths: tuple[int, ...], repeats: int, say: Callable[[str], None]) -> dict[str, dict[int, float]]:
    """Seconds per block {policy: {cache length: seconds}} and, in the same places, rows a query sees under "rows POLICY"."""
    weights = random_weights(shape.heads * shape.head_dim, shape.layers, shape.ffn, TEXT_DIM)
    table: dict[str, dict[int, float]] = {name: {} for name in policies(shape.block)}
    for length in lengths:
        engines = {name: SpeedEngine(shape, settings, length, weights) for name, settings in policies(shape.block).items()}
        times = {name: list[float]() for name in engines}
        for _ in range(repeats):
            for name, engine in engines.items():
                times[name].append(engine.block_seconds())
        for name, engine in engines.items():
            table[name][length] = min(times[name])
            table.setdefault(f"rows {name}", {})[length] = engine.visible_rows()
        say(f"{length:4d} frames  " + "  ".join(f"{name} {table[name][length]:.3f} s" for name in engines))
    return table


def rollout_seconds(per_block: dict[int, float], block: int) -> float:
    """Seconds of a rollout up to the longest length: trapezoid over the measured lengths, the first one extended to 0."""
    lengths = sorted(per_block)
    total = per_block[lengths[0]] * lengths[0]
    for a, b in pairwise(lengths):
        total += (per_block[a] + per_block[b]) / 2 * (b - a)
    return total / block


def _gate(shape: Shape) -> str:
    """TempCache with merging off must agree with the dense cache over a short rollout before any ratio is printed."""
    weights = random_weights(shape.heads * shape.head_dim, shape.layers, shape.ffn, TEXT_DIM)
    off = PolicySettings(kind="tempcache", sink_frames=SINK, tempcache=TempCacheSettings(budget_frames=64, threshold=1.01))
    outs = [SpeedEngine(shape, settings, 12, weights, real=True).first_output() for settings in (PolicySettings(), off)]
    return "green" if (outs[0] - outs[1]).abs().max() < 1e-5 * outs[0].abs().max() else "red"


def _targets(table: dict[str, dict[int, float]], block: int) -> list[dict[str, Any]]:
    total = {name: rollout_seconds(times, block) for name, times in table.items() if not name.startswith("rows")}
    mine = table["tempcache balanced"]
    last = max(mine)
    share = (table["rows tempcache balanced"][last]) / table[f"rows {DENSE}"][last]
    late = [mine[n] for n in sorted(mine)][-1] / [mine[n] for n in sorted(mine)][2]
    speed, equal = total[DENSE] / total["tempcache balanced"], total["tempcache balanced"] / total["bounded, equal budget"]
    small = total[f"stock bounded {STOCK_WINDOW}"] / total["tempcache small"]
    rows = [("end to end over dense unbounded, 750 frames (balanced)", speed, ">= 10.8", speed >= 10.8),
            ("time at equal KV budget / stock bounded's, 750 frames (balanced)", equal, "<= 1.08", equal <= 1.08),
            ("block time / dense block time at 750 frames minus kept fraction", mine[last] / table[DENSE][last] - share, "<= 0.05",
             mine[last] / table[DENSE][last] - share <= 0.05),
            ("time per block, last length / third length (balanced)", late, "<= 1.05", late <= 1.05),
            ("small preset: speed over stock bounded 21, 750 frames", small, ">= 1.2", small >= 1.2)]
    return [{"name": n, "value": v, "target": t, "holds": bool(h), "reason": None} for n, v, t, h in rows]


def run(arguments: list[str], say: Callable[[str], None] = print) -> dict[str, Any]:
    """Prints the table and returns {rows, targets, gate}."""
    parser = argparse.ArgumentParser(prog="bench.py rollout")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    shape = Shape(layers=options.layers)
    gate = _gate(Shape(rows=4, cols=5, layers=2, ffn=128))
    say(f"gate: {gate}; balanced preset: {PRESETS['balanced'].budget_frames:g} latent frames")
    if gate == "red":
        return {"name": "rollout", "gate": gate, "rows": [], "targets": []}
    table = measure(shape, tuple(options.lengths), options.repeats, say)
    rows = [{"policy": name, "seconds_per_block": times, "rollout_seconds": rollout_seconds(times, shape.block),
             "rows": table[f"rows {name}"]} for name, times in table.items() if not name.startswith("rows")]
    for row in rows:
        say(f"{row['policy']:24s} 750-frame rollout {row['rollout_seconds']:.1f} s")
    return {"name": "rollout", "gate": gate, "rows": rows, "targets": _targets(table, shape.block)}
