"""`python tests/bench.py sparse`: AnnSA and AnnCA on the demo model, and all three modules together (definitions: design 9).

Lockstep on the dense run's latents, measured where >= 120 latent frames are cached. Controls at equal density: random buckets,
sink+window, and the chaos floor. Gate: AnnSA at density 1 and the pad merge must give the dense run's pictures.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from bench.demo_engine import BLOCK, PREFIX, Tour, Weights, load_weights, lockstep, long_tour, make_plan, rollout
from bench.image_quality import psnr, ssim
from bench.rollout import LENGTHS, rollout_seconds
from bench.sparse_engine import MeasuredSparse, SparseEngine
from bench.sparse_speed import measure as measure_speed
from demo.data import Bank
from demo.gates import Judge
from fastar_pack.fastar_core.annca import AnnCASettings
from fastar_pack.fastar_core.annsa import AnnSASettings, walk
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.tempcache.plan import PRESETS

SINK, CHAOS, CACHED = 1, 1e-3, 120
HELD_OUT_TOURS = (3, 4)  # settings were chosen on tour 1
DENSITY = 0.28
TOGETHER, LARGER = "small", "balanced"  # TempCache presets of all three modules together
A_THIRD = 0.57  # coverage at which the demo's prompts keep about a third of their words
FULL = PolicySettings()
Row = dict[str, Any]


def annsa(**changes: Any) -> AnnSASettings:
    return AnnSASettings(**{"density": DENSITY, "only_if_faster": False, **changes})


def tempcache(name: str) -> PolicySettings:
    return PolicySettings("tempcache", sink_frames=SINK, tempcache=PRESETS[name])


def random_mass(q: torch.Tensor, codes: torch.Tensor, centres: torch.Tensor, buffer: Any) -> torch.Tensor:
    """The control: every bucket promises the same per key, give or take a draw."""
    shape = (*centres.shape[:3], buffer.means.shape[2])
    keys = (buffer.offsets[..., 1:] - buffer.offsets[..., :-1]).float()[:, :, None]
    return torch.rand(shape, generator=torch.Generator().manual_seed(buffer.rows)) * keys


class Bench:
    """One tour, its dense run, and what the modules make of its last blocks."""

    def __init__(self, weights: Weights, num_blocks: int, seed: int) -> None:
        bank = Bank()
        self.weights, self.judge = weights, Judge(bank)
        self.tour = Tour(bank, long_tour(seed, num_blocks))
        self.plan, self.seed = make_plan(self.tour, seed), seed
        first = max(num_blocks * 3 // 4, -(-(CACHED - PREFIX) // BLOCK))
        self.measured = list(range(first, num_blocks))
        self.dense = rollout(self.engine(FULL), self.plan)

    def engine(self, policy: PolicySettings, sparse: AnnSASettings | None = None, prompts: AnnCASettings | None = None) -> SparseEngine:
        return SparseEngine(self.weights, self.tour, policy, set(self.measured), sparse, prompts)

    def pictures(self, found: dict[int, torch.Tensor]) -> Row:
        """Mean PSNR and SSIM against the dense run's blocks, through the demo's decoder."""
        pairs = []
        for number, latent in found.items():
            start = PREFIX + BLOCK * number
            pairs.append((self.judge.pixels(latent[0]), self.judge.pixels(self.dense[0, :, start:start + BLOCK])))
        return {"psnr": sum(psnr(*p) for p in pairs) / len(pairs), "ssim": sum(ssim(*p) for p in pairs) / len(pairs)}

    def measure(self, policy: PolicySettings, sparse: AnnSASettings | None = None, prompts: AnnCASettings | None = None,
                blocks: list[int] | None = None) -> Row:
        engine = self.engine(policy, sparse, prompts)
        row = self.pictures(lockstep(engine, self.plan, self.dense, blocks or self.measured))
        if isinstance(engine.run.sparse, MeasuredSparse):
            row |= engine.run.sparse.result() | {"calls": dict(engine.run.sparse.tally.reasons)}
            row["layer_recall"] = {k: round(v, 4) for k, v in engine.run.sparse.tally.layer_recall().items()}
        if prompts is not None and prompts.keep != "all":
            row |= {f"{which}: {k}": v for which in ("all prompts", "long prompts") for k, v in engine.prompt_result(which).items()}
        return row

    def chaos(self) -> Row:
        """Dense against dense with a little noise on the start noise."""
        plan = make_plan(self.tour, self.seed, CHAOS)
        return self.pictures(lockstep(self.engine(FULL), plan, self.dense, self.measured[::2]))

    def window(self) -> PolicySettings:
        """Sink and window of the pairs AnnSA visits, at the middle of the measured blocks."""
        frames = PREFIX + BLOCK * (self.measured[len(self.measured) // 2] + 1)
        return PolicySettings("sink_window", max(SINK + 2 * BLOCK, round(DENSITY * frames)), SINK)


class Tours:
    """Several tours measured alike; figures are means over them, and those of each stand under "tours"."""

    def __init__(self, tours: list[Bench]) -> None:
        self.tours = tours
        self.judge = tours[0].judge

    def _mean(self, found: list[Row]) -> Row:
        row: Row = {key: sum(r[key] for r in found) / len(found) for key, value in found[0].items() if isinstance(value, float)}
        if "calls" in found[0]:
            row["calls"] = dict(sum((Counter(r["calls"]) for r in found), Counter()))
        return {**row, "tours": found}

    def measure(self, *given: Any, **named: Any) -> Row:
        return self._mean([tour.measure(*given, **named) for tour in self.tours])

    def chaos(self) -> Row:
        return self._mean([tour.chaos() for tour in self.tours])


def table(bench: Tours, say: Callable[[str], None]) -> dict[str, Row]:
    """Every row of the quality table."""
    rows: dict[str, Row] = {}

    def add(name: str, row: Row) -> None:
        rows[name] = row
        row = {key: value for key, value in row.items() if key != "tours"}
        say(f"{name:28s} " + "  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()))

    add("AnnSA", bench.measure(FULL, annsa()))
    add("AnnSA, equal layers", bench.measure(FULL, annsa(balance="layer")))
    add("AnnSA, sign hash", bench.measure(FULL, annsa(buckets="sign")))
    add("AnnSA, shared (paper)", bench.measure(FULL, annsa(buckets="shared", balance="layer")))
    with patch.object(walk, "expected_mass", random_mass):
        add("random buckets", bench.measure(FULL, annsa()))
    window = bench.tours[0].window()
    add(f"sink+window {window.window_frames}", bench.measure(window))
    add("chaos floor", bench.chaos())
    add("AnnCA, pad merge", bench.measure(FULL, prompts=AnnCASettings()))
    add("AnnCA, mass", bench.measure(FULL, prompts=AnnCASettings("mass", min_kept=1, start=0.3)))
    add("AnnCA, mass, a third", bench.measure(FULL, prompts=AnnCASettings("mass", coverage=A_THIRD, min_kept=1, start=0.3)))
    add("AnnCA, quant", bench.measure(FULL, prompts=AnnCASettings("quant", min_kept=1, start=0.3)))
    add("AnnCA, lsh", bench.measure(FULL, prompts=AnnCASettings("lsh", bits=6, tables=2, min_kept=1, start=0.3)))
    for preset in (LARGER, TOGETHER):
        add(f"all three, {preset}", bench.measure(tempcache(preset), annsa(only_if_faster=True), AnnCASettings()))
    add("all three, forced", bench.measure(tempcache("balanced"), annsa(density=0.5), AnnCASettings()))
    return rows


def check(bench: Tours) -> list[Row]:
    """PSNR of the exact settings against the dense run; 100 = equal."""
    blocks = bench.tours[0].measured[:1]
    everything = annsa(density=1.0, dense_share=0.0)
    return [{"check": "AnnSA at density 1", "psnr": bench.measure(FULL, everything, blocks=blocks)["psnr"]},
            {"check": "pad merge", "psnr": bench.measure(FULL, prompts=AnnCASettings(), blocks=blocks)["psnr"]}]


def target(name: str, value: float | None, wanted: str, holds: bool | None, reason: str | None = None) -> Row:
    if value is not None and value != value:  # not a number: nothing of the kind was measured
        value, reason = None, "no such prompt in the measured blocks; take more tours or blocks"
    return {"name": name, "value": value, "target": wanted, "holds": None if value is None else bool(holds), "reason": reason}


def _annca_targets(rows: dict[str, Row]) -> list[Row]:
    """The best choice of as many words says what any rule could reach on these prompts."""
    third, most = rows["AnnCA, mass, a third"], rows["AnnCA, mass"]
    recall, share, by_chance, best = (third[f"long prompts: {k}"] for k in ("recall", "density", "recall_random", "recall_best"))
    words = (f"the best choice of as many words holds {best:.3f}, as many random ones {by_chance:.3f}; at coverage .95 the rule reaches "
             f"{most['long prompts: recall']:.3f} with {most['long prompts: density']:.2f} of the words")
    return [target("AnnCA recall over real tokens (prompts of 9 words or more)", recall, ">= 0.94 and above random",
                   recall >= 0.94 and recall > by_chance, words),
            target("AnnCA share of real tokens kept (prompts of 9 words or more)", share, "<= 0.33", share <= 0.33)]


def targets(rows: dict[str, Row], speed: dict[str, dict[int, float]] | None) -> list[Row]:
    sparse, drawn, together = rows["AnnSA"], rows["random buckets"], rows[f"all three, {TOGETHER}"]
    ratio, told = None, "run with --speed"
    if speed is not None:
        totals = {name: rollout_seconds(times, BLOCK) for name, times in speed.items()}
        ratio = totals["dense unbounded"] / totals[f"all three, {TOGETHER}"]
        told = (f"AnnSA ran sparse in {together['calls'].get('sparse', 0)} calls of this preset: the rest is TempCache and "
                f"AnnCA; the {LARGER} preset gives {totals['dense unbounded'] / totals[f'all three, {LARGER}']:.2f}, AnnSA alone "
                f"{totals['dense unbounded'] / totals['AnnSA alone']:.2f}; CPU seconds")
    return [
        target("AnnSA recall at >= 120 cached frames", sparse["recall"], ">= 0.94", sparse["recall"] >= 0.94),
        target("AnnSA density over its sparse pairs", sparse["density"], "<= 0.28", sparse["density"] <= 0.2805),
        *_annca_targets(rows),
        target("AnnSA lockstep PSNR", sparse["psnr"], "> 25.8 and above random buckets", sparse["psnr"] > max(25.8, drawn["psnr"])),
        target("AnnSA lockstep SSIM", sparse["ssim"], "> 0.69 and above random buckets", sparse["ssim"] > max(0.69, drawn["ssim"])),
        target(f"all three ({TOGETHER}): end to end over dense unbounded, 750 frames", ratio, ">= 12",
               ratio is not None and ratio >= 12, told),
        target(f"all three ({TOGETHER}): lockstep PSNR", together["psnr"], ">= 25.7", together["psnr"] >= 25.7),
    ]


def run(arguments: list[str], say: Callable[[str], None] = print) -> dict[str, Any]:
    """Prints the table; returns {name, gate, rows, targets}."""
    parser = argparse.ArgumentParser(prog="bench.py sparse")
    parser.add_argument("--checkpoint", type=Path, help="a training checkpoint instead of the shipped demo model")
    parser.add_argument("--blocks", type=int, default=56, help="blocks of 3 latent frames")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(HELD_OUT_TOURS), help="tours; figures are means over them")
    parser.add_argument("--speed", action="store_true", help="time the 750-frame rollout too (minutes)")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if PREFIX + BLOCK * (options.blocks - 1) < CACHED:
        parser.error(f"--blocks {options.blocks}: at least {-(-(CACHED - PREFIX) // BLOCK) + 1} are needed for {CACHED} cached frames")
    say(f"dense rollout of {options.blocks} blocks")
    weights = load_weights(options.checkpoint)
    bench = Tours([Bench(weights, options.blocks, seed) for seed in options.seeds])
    checked = check(bench)
    gate = "green" if all(row["psnr"] > 60 for row in checked) else "red"
    if gate == "red":
        return {"name": "sparse", "gate": gate, "rows": checked, "targets": []}
    rows = table(bench, say)
    speed = measure_speed(tuple(options.lengths), say) if options.speed else None
    listed = [*checked, *({"policy": name, **row} for name, row in rows.items())]
    listed += [{"policy": name, "seconds_per_block": times} for name, times in (speed or {}).items()]
    return {"name": "sparse", "gate": gate, "rows": listed, "targets": targets(rows, speed)}
