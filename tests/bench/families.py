"""Time and bytes per block of every family, with its own cache rule and with TempCache, on tiny models with random weights.

For Rolling-Forcing also stock, unbounded and TempCache-extended late in a long video. Figures are end to end without a VAE: model
calls and all work of the policy. A ratio is printed only when TempCache with room for everything equals the dense cache in this run.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.drivers import BlockwisePlan, call_frames, run_plan, timeline_frames
from fastar_pack.fastar_core.noise import SeededRenoise, seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.presets import Preset, get_preset, preset_keys, schedule
from fastar_pack.fastar_core.run_choice import RunChoice, choose_run, preset_policy
from fastar_pack.fastar_core.tempcache.settings import TempCacheSettings

from tiny.plain_engine import PlainEngine
from tiny.weights import random_weights

HEADS, LAYERS, TEXT = 2, 2, 32
SIZE = (16, 26)  # latent rows and columns: 8 x 13 tokens per latent frame
SMALL = (8, 12)
LENGTHS = (126, 750)
LIMIT = 1.10
TOLERANCE = 1e-4
# rows of history beside sink 3 and the recent frames; a full cache has nothing to be equal to, 12 is a usual window
FULL_BUDGET = 12


@dataclass
class Timed:
    """Seconds and peak cache bytes of a run, and its latents."""

    seconds: list[float]
    bytes: int
    latents: torch.Tensor


def tempcache(budget: float, sink: int, recent: int = 3, **changes: Any) -> PolicySettings:
    return PolicySettings("tempcache", None, sink, tempcache=TempCacheSettings(budget_frames=budget, recent_frames=recent, **changes))


def make_engine(weights: dict[str, torch.Tensor], run: RunChoice, policy: PolicySettings, frames: int, total: int, size: tuple[int, int],
                levels: int) -> PlainEngine:
    texts = [seeded_normal(50 + i, (1, 16, TEXT)) for i in range(2)]
    longest = call_frames(run.loop, run.block, levels, run.recache_frames)
    shape = (1, 16, timeline_frames(run.restart, total, 0), *size)
    return PlainEngine(weights, texts, HEADS, shape, run.block, policy, call_frames=min(frames, longest))


def rollout(weights: dict[str, torch.Tensor], preset: Preset, policy: PolicySettings, frames: int, size: tuple[int, int] = SMALL) -> Timed:
    """A whole video, with a prompt switch in its middle; seconds per block."""
    steps = schedule(preset)
    run = choose_run(preset, policy, len(steps.sigmas), switching=True)
    engine = make_engine(weights, run, run.policy, frames, frames, size, len(steps.sigmas))
    restart = None if run.restart is None else replace(run.restart, anchor=lambda pixel: seeded_normal(pixel, (1, 16, 1, *size)))
    plan = BlockwisePlan(seeded_normal(7, (1, 16, frames, *size)), steps, run.block, SeededRenoise(3), recache_frames=run.recache_frames,
                         restart=restart, solver=run.solver, prompt_at=lambda frame: int(frame >= frames // 2))
    parts, seconds, begun = [], [], time.perf_counter()
    with torch.no_grad():
        for done in run_plan(run.loop, engine, plan):
            parts.append(done.latent)
            seconds.append(time.perf_counter() - begun)
            begun = time.perf_counter()
    return Timed(seconds, engine.run.peak_bytes, torch.cat(parts, 2))


def check(weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """Per kind of loop: distance between the dense cache and a TempCache that merges nothing. Near 0 when the code is right."""
    cases = {"self_forcing": PolicySettings(), "rolling_forcing": PolicySettings("rolling", None, 3), "krea": PolicySettings()}
    found = {}
    for key, dense in cases.items():
        frames = 18
        roomy = tempcache(frames + 12, 3, threshold=1.01)
        preset = get_preset(key)
        found[key] = float((rollout(weights, preset, dense, frames).latents - rollout(weights, preset, roomy, frames).latents).abs().max())
    return found


def family_rows(weights: dict[str, torch.Tensor], keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for key in keys:
        preset = get_preset(key)
        steps = schedule(preset)
        frames = 24 * preset.block // 3 if preset.solver == "unipc" else 12 * preset.block + 12
        budget = max(FULL_BUDGET, preset.window_frames or 0)
        stock = rollout(weights, preset, preset_policy(preset), frames)
        temp = rollout(weights, preset, tempcache(budget, max(1, preset.sink_frames)), frames)
        per_block = [sum(one.seconds) / len(one.seconds) for one in (stock, temp)]
        yield {"family": key, "latent_frames": frames, "blocks": len(stock.seconds), "steps": len(steps.sigmas),
               "tempcache_budget_frames": budget, "stock_ms_per_block": 1000 * per_block[0], "tempcache_ms_per_block": 1000 * per_block[1],
               "time_ratio": per_block[1] / per_block[0], "stock_bytes": stock.bytes, "tempcache_bytes": temp.bytes,
               "bytes_ratio": temp.bytes / stock.bytes}


# -- Rolling-Forcing late in a long video -----------------------------------------------------------------------------------


class Late:
    """One cache rule of Rolling-Forcing with ``frames`` latent frames behind it; a window move is a denoise and a clean call."""

    def __init__(self, weights: dict[str, torch.Tensor], policy: PolicySettings, frames: int, moves: int) -> None:
        preset = get_preset("rolling_forcing")
        steps = schedule(preset)
        self.levels = [pair for pair in reversed(steps.for_block(0)) for _ in range(3)]
        self.run = choose_run(preset, policy, len(steps.sigmas))
        total = frames + 3 * moves + 15
        self.engine = make_engine(weights, self.run, policy, 15, total, SIZE, len(steps.sigmas))
        self.rows, self.cols = self.engine.run.geometry.rows, self.engine.run.geometry.cols
        self.at = 0
        self._fill(frames)

    def _context(self, phase: str, start: int, count: int) -> FwdCtx:
        pairs = self.levels[:count] if phase == "denoise" else [(0.0, 0.0)] * count
        return FwdCtx(phase, start, count, tuple(s for s, _ in pairs), tuple(t for _, t in pairs), self.rows, self.cols)  # type: ignore[arg-type]

    def _fill(self, frames: int) -> None:
        """Clean passes over random rows; attention itself is left out, all bookkeeping and merging is done."""
        state, generator = self.engine.run, torch.Generator().manual_seed(1)
        true = state.attention.attend
        state.attention.attend = lambda q, k, v, bias=None: torch.zeros_like(q)  # type: ignore[method-assign]
        shape = (1, 3 * self.rows * self.cols, HEADS, state.rope.head_dim)
        for start in range(0, frames, 3):
            ctx = self._context("clean", start, 3)
            state.begin(ctx)
            for layer in range(LAYERS):
                q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
                state.policy("positive").attend(layer, q, k, v, ctx)
            state.end()
        state.attention.attend = true  # type: ignore[method-assign]
        self.at = frames

    def move(self) -> float:
        """Seconds of one move of the window."""
        x = seeded_normal(self.at, (1, 16, 15, *SIZE))
        begun = time.perf_counter()
        x0 = self.engine(x, self._context("denoise", self.at, 15))
        self.engine(x0[:, :, :3], self._context("clean", self.at, 3))
        self.at += 3
        return time.perf_counter() - begun

    def bytes(self) -> int:
        return self.engine.run.bytes()


def rolling_rows(weights: dict[str, torch.Tensor], frames: int, moves: int = 4) -> list[dict[str, Any]]:
    """Interleaved moves, the fastest of each rule. Equal budget = as many rows attended as stock: 6 beside the window of 15."""
    rules = {"stock": PolicySettings("rolling", 21, 3), "unbounded": PolicySettings("rolling", None, 3),
             "extended, equal attended": tempcache(6, 3, recent=1), "extended, equal stored": tempcache(24, 3)}
    late = {name: Late(weights, policy, frames, moves) for name, policy in rules.items()}
    found: dict[str, list[float]] = {name: [] for name in rules}
    with torch.no_grad():
        for _ in range(moves):
            for name, one in late.items():
                found[name].append(one.move())
    least = {name: min(values[1:]) for name, values in found.items()}
    return [{"rolling_forcing": name, "latent_frames": frames, "ms_per_block": 1000 * least[name], "bytes": late[name].bytes(),
             "time_vs_stock": least[name] / least["stock"], "bytes_vs_unbounded": late[name].bytes() / late["unbounded"].bytes()}
            for name in rules]


def target(frames: int, rows: list[dict[str, Any]] | None, why: str) -> dict[str, Any]:
    name = f"Rolling-Forcing extended by TempCache vs stock at {frames} latent frames, equal budget: time per block at most"
    if rows is None:
        return {"name": name, "value": None, "target": LIMIT, "holds": None, "reason": why}
    value = next(row["time_vs_stock"] for row in rows if row["rolling_forcing"] == "extended, equal attended")
    return {"name": name, "value": value, "target": LIMIT, "holds": value <= LIMIT, "reason": ""}


def main(args: Any = None) -> dict[str, Any]:
    """The result in the form of the bench. ``args.quick`` leaves out most families and the longest video."""
    quick = bool(getattr(args, "quick", False))
    small = random_weights(128, LAYERS, 256, TEXT)
    differences = check(small)
    green = all(value < TOLERANCE for value in differences.values())
    result: dict[str, Any] = {"name": "families", "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, CPU",
                              "gate": "green" if green else "red",
                              "rows": [{"check": key, "largest_difference": value} for key, value in differences.items()], "targets": []}
    why = "" if green else f"TempCache without merging differs from the dense cache: {differences}"
    if green:
        keys = ("self_forcing", "rolling_forcing", "krea") if quick else preset_keys()
        result["rows"] += list(family_rows(small, keys))
    large = random_weights(256, LAYERS, 1024, TEXT)
    for frames in LENGTHS:
        skipped = "left out by --quick" if quick and frames > LENGTHS[0] else why
        rows = None if skipped else rolling_rows(large, frames)
        result["rows"] += rows or []
        result["targets"].append(target(frames, rows, skipped))
    return result


def in_words(result: dict[str, Any]) -> str:
    """A table of the rows and the targets."""
    lines = [f"families, {result['machine']}: correctness {result['gate']}"]
    for row in result["rows"]:
        lines.append("  " + ", ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()))
    for one in result["targets"]:
        state = "not measured: " + one["reason"] if one["holds"] is None else ("holds" if one["holds"] else "MISSED")
        lines.append(f"  {one['name']} {one['target']}: {one['value'] if one['value'] is None else round(one['value'], 3)} ({state})")
    return "\n".join(lines)


def command_line(make: Callable[[Any], dict[str, Any]] = main) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three families and the shorter video only")
    print(in_words(make(parser.parse_args())))
