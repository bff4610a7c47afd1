"""`python tests/bench.py tempcache`: quality of cache policies on the demo model (definitions: design 9).

Per tour, one dense rollout of >= 240 latent frames gives the clean latents. Every policy is fed exactly these, denoises the blocks of the
last quarter with the dense run's draws, and is measured there: recall, density, output error, and PSNR / SSIM against the dense
run's block. Gate (d): the landmark on the return to a place after >= 27 latent frames away, in free rollouts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.demo_engine import BLOCK, PREFIX, DemoEngine, Tour, Weights, load_weights, lockstep, long_tour, make_plan, rollout
from bench.image_quality import psnr, ssim
from bench.recall import RecallEngine
from demo.data import Bank
from demo.gates import BACK, Judge, itinerary, wilson
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.tempcache.plan import PRESETS
from fastar_pack.fastar_core.tempcache.pool import Ingested
from fastar_pack.fastar_core.tempcache.settings import TempCacheSettings

SINK = 1
CHAOS = 1e-3
STOCK_WINDOW = 21
HELD_OUT_TOURS = (3, 4, 5, 6)  # the presets were chosen on tours 1, 2, 11 and 12


def tempcache(settings: TempCacheSettings) -> PolicySettings:
    """The demo's policy: its slate is the sink."""
    return PolicySettings(kind="tempcache", sink_frames=SINK, tempcache=settings)


def window(frames: int) -> PolicySettings:
    """Sink and window of that many visible latent frames, own block included."""
    return PolicySettings(kind="sink_window", window_frames=frames, sink_frames=SINK)


class RandomEviction(RecallEngine):
    """Control: nothing merges, and which row goes when the pool is full is drawn at random."""

    def _follow(self, layer: int, frame: int, went: Ingested) -> None:
        super()._follow(layer, frame, went)
        pool = self.policy().stores(layer)[0].pool  # type: ignore[attr-defined]
        generator = torch.Generator().manual_seed(1000 * frame + layer)
        pool.usage = torch.rand(pool.usage.shape, generator=generator)


class Quality:
    """The dense run of one tour, and what every policy makes of it."""

    def __init__(self, weights: Weights, bank: Bank, num_blocks: int, seed: int) -> None:
        self.weights, self.judge = weights, Judge(bank)
        self.tour = Tour(bank, long_tour(seed, num_blocks))
        self.plan = make_plan(self.tour, seed)
        self.measured = list(range(num_blocks * 3 // 4, num_blocks))
        self.dense = rollout(DemoEngine(weights, self.tour, PolicySettings()), self.plan)

    def _block(self, number: int) -> torch.Tensor:
        start = PREFIX + BLOCK * number
        return self.dense[:, :, start:start + BLOCK]

    def measure(self, settings: PolicySettings, kind: type[RecallEngine] = RecallEngine) -> dict[str, float]:
        """Recall, density, error, PSNR and SSIM of one policy, and the seconds it took."""
        begun = time.perf_counter()
        engine = kind(self.weights, self.tour, settings)
        engine.prepare(set(self.measured))
        found = lockstep(engine, self.plan, self.dense, self.measured)
        return {**engine.result(), **self._pictures(found), "seconds": time.perf_counter() - begun}

    def _pictures(self, found: dict[int, torch.Tensor]) -> dict[str, float]:
        pairs = [(self.judge.pixels(latent[0]), self.judge.pixels(self._block(number)[0])) for number, latent in found.items()]
        return {"psnr": sum(psnr(*pair) for pair in pairs) / len(pairs), "ssim": sum(ssim(*pair) for pair in pairs) / len(pairs)}

    def chaos(self) -> dict[str, float]:
        """Dense against dense with a little noise on the start noise: what no policy needs to beat."""
        plan = make_plan(self.tour, self.plan.renoise.seed, CHAOS)  # type: ignore[attr-defined]
        engine = DemoEngine(self.weights, self.tour, PolicySettings())
        return self._pictures(lockstep(engine, plan, self.dense, self.measured[::4]))


def return_gate(weights: Weights, bank: Bank, settings: PolicySettings, seeds: int) -> tuple[float, float, float]:
    """Share of returns drawn with the right landmark, with its 95 % interval."""
    judge, hits = Judge(bank), 0
    for seed in range(seeds):
        blocks = itinerary(seed)[:BACK + 1]
        tour = Tour(bank, blocks)
        latents = rollout(DemoEngine(weights, tour, settings), make_plan(tour, seed))
        hits += judge.landmark(latents[0, :, -1], blocks[BACK].right)
    return wilson(hits, seeds)


def policies() -> dict[str, tuple[PolicySettings, type[RecallEngine]]]:
    """The rows of the table; controls have the visible frames of the balanced preset."""
    balanced = PRESETS["balanced"]
    equal = int(balanced.budget_frames) + BLOCK
    rows = {f"tempcache {name}": (tempcache(settings), RecallEngine) for name, settings in PRESETS.items()}
    return {
        "dense unbounded": (PolicySettings(), RecallEngine), **rows,
        f"sink+window {equal}": (window(equal), RecallEngine),
        "random eviction": (tempcache(replace(balanced, threshold=1.01)), RandomEviction),
        f"stock bounded {STOCK_WINDOW}": (window(STOCK_WINDOW), RecallEngine),
    }


def ablations() -> dict[str, TempCacheSettings]:
    """One change at a time from the balanced preset."""
    base = PRESETS["balanced"]
    changes: dict[str, dict[str, Any]] = {f"threshold {t}": {"threshold": t} for t in (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)}
    changes |= {f"representative {r}": {"representative": r} for r in ("last", "medoid")}
    changes |= {"pre-RoPE, last key (paper)": {"space": "pre", "representative": "last", "bias_correction": 0.0},
                "pre-RoPE, last key, 0.9, at once (paper)": {"space": "pre", "representative": "last", "threshold": 0.9, "shared": True,
                                                             "recent_frames": 0, "bias_correction": 0.0, "regroup": False},
                "pre-RoPE, mean key": {"space": "pre"},
                "heads share matches": {"shared": True}, "merge at once": {"recent_frames": 0}, "recent 6": {"recent_frames": 6},
                "groups never join": {"regroup": False}, "re-index 21": {"reindex_span": 21}, "int8 history": {"history_type": "int8"},
                "logit similarity": {"similarity": "logit", "threshold": 0.9, "floor": -2.0}, "exact search": {"search": "exact"}}
    changes |= {f"bias correction up to {c}": {"bias_correction": c} for c in (0.0, 0.1, 1.0)}
    changes |= {f"lsh {bits} bits": {"search": "lsh", "bits": bits} for bits in (2, 8, 16, 31)}
    changes |= {f"neighbourhood {n}": {"neighbourhood": n} for n in (0, 3)}
    changes |= {f"budget {b}": {"budget_frames": float(b)} for b in (9, 13, 24, 30, 45)}
    return {name: replace(base, **change) for name, change in changes.items()}


def _mean(found: list[dict[str, float]]) -> dict[str, Any]:
    """Means over tours, and under "tours" the figures of each."""
    return {**{key: sum(row[key] for row in found) / len(found) for key in found[0]}, "tours": found}


def _line(name: str, row: dict[str, Any]) -> str:
    shown = {k: v for k, v in row.items() if isinstance(v, float) and k != "seconds"}
    return f"{name:50s} " + "  ".join(f"{k} {v:.4f}" for k, v in shown.items()) + f"  ({row.get('seconds', 0):.0f} s)"


def _targets(rows: dict[str, dict[str, float]], gates: dict[str, tuple[float, float, float]]) -> list[dict[str, Any]]:
    mine, equal = rows["tempcache balanced"], int(PRESETS["balanced"].budget_frames) + BLOCK
    other, drawn = rows[f"sink+window {equal}"], rows["random eviction"]
    listed = [
        ("history recall (balanced)", mine["history_recall"], ">= 0.90", mine["history_recall"] >= 0.9),
        ("all-key recall (balanced)", mine["recall"], ">= 0.95", mine["recall"] >= 0.95),
        ("density (balanced)", mine["density"], "<= 0.16", mine["density"] <= 0.16),
        ("lockstep PSNR", mine["psnr"], "> 24.26 and above both controls", mine["psnr"] > max(24.26, other["psnr"], drawn["psnr"])),
        ("lockstep SSIM", mine["ssim"], "> 0.653 and above both controls", mine["ssim"] > max(0.653, other["ssim"], drawn["ssim"])),
    ]
    if gates:
        lost = gates["dense unbounded"][0] - gates["tempcache balanced"][0]
        listed.append(("gate (d): points below everything kept", 100 * lost, "<= 5", lost <= 0.05))
        small, stock = rows["tempcache small"], rows[f"stock bounded {STOCK_WINDOW}"]
        returned = gates["tempcache small"][0] > gates[f"stock bounded {STOCK_WINDOW}"][0]
        above = small["history_recall"] > stock["history_recall"] and returned
        listed.append(("small budget above stock bounded in recall and gate (d)", small["history_recall"], "above", above))
    return [{"name": n, "value": v, "target": t, "holds": bool(h), "reason": None} for n, v, t, h in listed]


def run(arguments: list[str], say: Callable[[str], None] = print) -> dict[str, Any]:
    """Prints the tables; returns {rows, gates, targets, gate}. The gate: the dense policy must have recall 1 and no error."""
    parser = argparse.ArgumentParser(prog="bench.py tempcache")
    parser.add_argument("--checkpoint", type=Path, help="a training checkpoint instead of the shipped demo model")
    parser.add_argument("--blocks", type=int, default=80, help="blocks of 3 latent frames")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(HELD_OUT_TOURS), help="tours; figures are means over them")
    parser.add_argument("--returns", type=int, default=0, help="seeds for gate (d); 0 leaves it out")
    parser.add_argument("--ablations", action="store_true")
    options = parser.parse_args(arguments)
    bank, weights = Bank(), load_weights(options.checkpoint)
    tours = [Quality(weights, bank, options.blocks, seed) for seed in options.seeds]
    rows: dict[str, dict[str, float]] = {}
    wanted: dict[str, tuple[PolicySettings, type[RecallEngine]]] = policies()
    if options.ablations:
        wanted |= {name: (tempcache(settings), RecallEngine) for name, settings in ablations().items()}
    for name, (settings, kind) in wanted.items():
        rows[name] = _mean([tour.measure(settings, kind) for tour in tours])
        say(_line(name, rows[name]))
    rows["chaos floor"] = _mean([tour.chaos() for tour in tours])
    say(_line("chaos floor", rows["chaos floor"]))
    dense = rows["dense unbounded"]
    gate = "green" if abs(dense["recall"] - 1) < 1e-4 and dense["error"] < 1e-4 and dense["psnr"] > 60 else "red"
    gates = {}
    for name, (settings, _) in policies().items() if options.returns else ():
        gates[name] = return_gate(weights, bank, settings, options.returns)
        say(f"{name:50s} gate (d) {gates[name][0]:.3f} [{gates[name][1]:.3f}, {gates[name][2]:.3f}]")
    return {"name": "tempcache", "gate": gate, "rows": [{"policy": n, **r} for n, r in rows.items()],
            "gates": {n: list(v) for n, v in gates.items()}, "targets": _targets(rows, gates) if gate == "green" else []}
