"""`python tests/bench.py families`: time and bytes per block of every family, with its own cache rule and with TempCache.

Tiny models with random weights. For Rolling-Forcing also stock, unbounded and TempCache-extended late in a long video. Figures are
end to end without a VAE (model calls and all work of the policy) in CPU seconds of one thread, which a busy machine hardly changes.
A ratio is printed only when TempCache with room for everything equals the dense cache in this run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.drivers import BlockwisePlan, LoopKind, call_frames, run_plan, timeline_frames
from fastar_pack.fastar_core.noise import SeededRenoise, seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings, make_policy
from fastar_pack.fastar_core.policies.frame_cache import FrameCache
from fastar_pack.fastar_core.presets import Preset, get_preset, preset_keys, schedule
from fastar_pack.fastar_core.run_choice import RunChoice, choose_run, preset_policy
from fastar_pack.fastar_core.tempcache.settings import TempCacheSettings
from tiny.plain_engine import PlainEngine
from tiny.weights import random_weights

HEADS, LAYERS, TEXT = 2, 2, 32
SIZE, WIDE_HEADS = (16, 26), 4  # of the long video: latent rows and columns (8 x 13 tokens per latent frame), heads of 128
SMALL = (8, 12)
LENGTHS = (126, 750)
LIMIT = 1.10
TOLERANCE = 1e-4
FULL_BUDGET = 12  # a full cache has no budget to be equal to; 12 latent frames is a usual window
RECENT = 1


@dataclass
class Timed:
    """Seconds and peak cache bytes of a run, and its latents."""

    seconds: list[float]
    bytes: int
    latents: torch.Tensor


def tempcache(budget: float, sink: int, recent: int = RECENT, **changes: Any) -> PolicySettings:
    return PolicySettings("tempcache", None, sink, tempcache=TempCacheSettings(budget_frames=budget, recent_frames=recent, **changes))


def make_engine(weights: dict[str, torch.Tensor], run: RunChoice, policy: PolicySettings, total: int, size: tuple[int, int],
                levels: int, heads: int = HEADS) -> PlainEngine:
    texts = [seeded_normal(50 + i, (1, 16, TEXT)) for i in range(2)]
    longest = call_frames(run.loop, run.block, levels, run.recache_frames)
    shape = (1, 16, timeline_frames(run.restart, total, 0), *size)
    return PlainEngine(weights, texts, heads, shape, run.block, policy, call_frames=min(total, longest))


def rollout(weights: dict[str, torch.Tensor], preset: Preset, policy: PolicySettings, frames: int, size: tuple[int, int] = SMALL) -> Timed:
    """A whole video, with a prompt switch in its middle; seconds per block."""
    steps = schedule(preset)
    run = choose_run(preset, policy, len(steps.sigmas), switching=True)
    settings = replace(policy, recache=run.policy.recache)  # the sizes asked for, not those a family would choose
    engine = make_engine(weights, run, settings, frames, size, len(steps.sigmas))
    restart = None if run.restart is None else replace(run.restart, anchor=lambda pixel: seeded_normal(pixel, (1, 16, 1, *size)))
    plan = BlockwisePlan(seeded_normal(7, (1, 16, frames, *size)), steps, run.block, SeededRenoise(3), recache_frames=run.recache_frames,
                         restart=restart, solver=run.solver, prompt_at=lambda frame: int(frame >= frames // 2))
    parts, seconds, begun = [], [], time.process_time()
    with torch.no_grad():
        for done in run_plan(run.loop, engine, plan):
            parts.append(done.latent)
            seconds.append(time.process_time() - begun)
            begun = time.process_time()
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
        frames = {"unipc": 6, "renoise": 6 * preset.block + 6}[preset.solver]
        own = call_frames(cast(LoopKind, preset.loop), preset.block, len(steps.sigmas), None)
        budget = max(preset.sink_frames + RECENT + 2, preset.window_frames - own) if preset.window_frames else FULL_BUDGET
        stock = rollout(weights, preset, preset_policy(preset), frames)
        temp = rollout(weights, preset, tempcache(budget, preset.sink_frames), frames)
        per_block = [sum(one.seconds[1:]) / len(one.seconds[1:]) for one in (stock, temp)]
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
        self.engine = make_engine(weights, self.run, policy, total, SIZE, len(steps.sigmas), WIDE_HEADS)
        self.rows, self.cols = self.engine.run.geometry.rows, self.engine.run.geometry.cols
        self._fill(frames)

    def _context(self, phase: str, start: int, count: int) -> FwdCtx:
        pairs = self.levels[:count] if phase == "denoise" else [(0.0, 0.0)] * count
        return FwdCtx(phase, start, count, tuple(s for s, _ in pairs), tuple(t for _, t in pairs), self.rows, self.cols)  # type: ignore[arg-type]

    def _fill(self, frames: int) -> None:
        """Random rows: straight into the slots of a frame cache, through clean passes into TempCache (without attention itself)."""
        state, generator = self.engine.run, torch.Generator().manual_seed(1)
        policy = state.adopt("positive", make_policy(state.settings, state.geometry, state.rope, state.attention))
        tokens = self.rows * self.cols
        self.at = frames

        def drawn(count: int) -> torch.Tensor:
            return torch.randn((1, count * tokens, WIDE_HEADS, state.rope.head_dim), generator=generator)

        if isinstance(policy, FrameCache):
            kept = [*range(policy.sink), *range(max(policy.sink, frames + policy.sink - policy.capacity), frames)]
            policy.frames = [*kept, *[None] * (policy.capacity - len(kept))]
            policy.end = frames
            for layer in range(LAYERS):
                policy.adopt(layer, drawn(policy.capacity), drawn(policy.capacity))
            return
        true = state.attention.attend
        state.attention.attend = lambda q, *rest, **more: torch.zeros_like(q)  # type: ignore[method-assign]
        for start in range(0, frames, 3):
            ctx = self._context("clean", start, 3)
            policy.begin(ctx)
            for layer in range(LAYERS):
                policy.attend(layer, drawn(3), drawn(3), drawn(3), ctx)
            policy.commit(ctx)
        state.attention.attend = true  # type: ignore[method-assign]

    def move(self) -> float:
        """Seconds of one move of the window."""
        x = seeded_normal(self.at, (1, 16, 15, *SIZE))
        begun = time.process_time()
        x0 = self.engine(x, self._context("denoise", self.at, 15))
        self.engine(x0[:, :, :3], self._context("clean", self.at, 3))
        self.at += 3
        return time.process_time() - begun

    def bytes(self) -> int:
        return self.engine.run.bytes()


def rolling_rows(weights: dict[str, torch.Tensor], frames: int, moves: int = 4) -> list[dict[str, Any]]:
    """Interleaved moves, the fastest of each rule. Equal budget = as many rows attended as stock: 6 beside the window of 15."""
    rules = {"stock": PolicySettings("rolling", 21, 3), "unbounded": PolicySettings("rolling", None, 3),
             "extended, equal attended": tempcache(6, 3), "extended, equal stored": tempcache(24, 3)}
    late = {name: Late(weights, policy, frames, moves) for name, policy in rules.items()}
    found: dict[str, list[float]] = {name: [] for name in rules}
    with torch.no_grad():
        for turn in range(moves):
            for name, one in late.items():
                if name != "unbounded" or not turn:  # once is enough for the slow one
                    found[name].append(one.move())
    least = {name: min(values) for name, values in found.items()}
    return [{"rolling_forcing": name, "latent_frames": frames, "ms_per_block": 1000 * least[name], "bytes": late[name].bytes(),
             "time_vs_stock": least[name] / least["stock"], "bytes_vs_unbounded": late[name].bytes() / late["unbounded"].bytes()}
            for name in rules]


def target(frames: int, rows: list[dict[str, Any]] | None, why: str) -> dict[str, Any]:
    name = f"Rolling-Forcing extended by TempCache vs stock at {frames} latent frames, equal budget: time per block at most"
    if rows is None:
        return {"name": name, "value": None, "target": LIMIT, "holds": None, "reason": why}
    value = next(row["time_vs_stock"] for row in rows if row["rolling_forcing"] == "extended, equal attended")
    return {"name": name, "value": value, "target": LIMIT, "holds": value <= LIMIT, "reason": ""}


def shown(row: dict[str, Any]) -> str:
    """A row in words."""
    return "  " + ", ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())


def run(arguments: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
    """The bench; see tests/bench.py for the form of its result."""
    parser = argparse.ArgumentParser(prog="bench.py families", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three families and the shorter video only")
    quick = parser.parse_args(list(arguments)).quick
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other would count as work
    try:
        return _measured(quick, say)
    finally:
        torch.set_num_threads(threads)


def _measured(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    small = random_weights(128, LAYERS, 256, TEXT)
    differences = check(small)
    green = all(value < TOLERANCE for value in differences.values())
    rows: list[dict[str, Any]] = [{"check": key, "largest_difference": value} for key, value in differences.items()]
    targets = []
    if green:
        for row in family_rows(small, ("self_forcing", "rolling_forcing", "krea") if quick else preset_keys()):
            rows.append(row)
            say(shown(row))
    wide = random_weights(128 * WIDE_HEADS, LAYERS, 512 * WIDE_HEADS, TEXT)
    why = "" if green else f"TempCache without merging differs from the dense cache: {differences}"
    for frames in LENGTHS:
        skipped = "left out by --quick" if quick and frames > LENGTHS[0] else why
        late = None if skipped else rolling_rows(wide, frames)
        for row in late or []:
            rows.append(row)
            say(shown(row))
        targets.append(target(frames, late, skipped))
    return {"name": "families", "gate": "green" if green else "red", "rows": rows, "targets": targets}
