"""Seconds per block of dense unbounded and of all three modules at several cache lengths, in CPU seconds, prompts padded to 512 rows."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bench.speed_engine import SIGMAS, Shape, SpeedEngine
from fastar_pack.fastar_core.annca import AnnCASettings, PromptPruner
from fastar_pack.fastar_core.annca.pruner import PromptCall
from fastar_pack.fastar_core.annsa import AnnSASettings, SparseAttention
from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.tempcache.plan import PRESETS
from tiny.wan_plain import dense_attention, wan_forward
from tiny.weights import random_weights

REPEATS, SINK, TEXT_DIM, ROWS, WORDS = 3, 1, 64, 512, 100


class ModulesEngine(SpeedEngine):
    """A SpeedEngine whose prompt has padding, with AnnCA and AnnSA where given."""

    def attach(self, annsa: AnnSASettings | None, annca: AnnCASettings | None) -> None:
        self.text = torch.nn.functional.pad(torch.randn(1, WORDS, TEXT_DIM, generator=self.generator), (0, 0, 0, ROWS - WORDS))
        run = self.run
        if annsa is not None:
            run.sparse = run.attention.sparse = SparseAttention(annsa, SIGMAS)
        if annca is not None:
            run.prompts = PromptPruner(annca, run.attention, SIGMAS)

    @torch.no_grad()
    def _call(self, ctx: FwdCtx, x: torch.Tensor) -> torch.Tensor:
        run, policy = self.run, None
        run.begin(ctx)
        policy = run.policy("positive")
        if run.prompts is not None:
            run.prompts.start_call(self.text, ["prompt"], PromptCall(max(ctx.sigmas), ctx.num_frames, (ctx.block, ctx.start)))

        def cross(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = None if run.prompts is None else run.prompts.attend(layer, q, k, v)
            return dense_attention(layer, q, k, v) if out is None else out

        out = wan_forward(self.weights, x, torch.tensor([ctx.timesteps]), self.text, num_heads=self.shape.heads, cross=cross,
                          attend=lambda layer, q, k, v: policy.attend(layer, q, k, v, ctx))
        run.end()
        return out

    def cpu_seconds(self) -> float:
        """CPU seconds of one block."""
        begun = time.process_time()
        self.block_seconds()
        return time.process_time() - begun


def measure(lengths: tuple[int, ...], say: Callable[[str], None]) -> dict[str, dict[int, float]]:
    """{policy: {cache length in latent frames: seconds}}, interleaved, the minimum of 3 repeats."""
    shape = Shape(layers=1)
    weights = random_weights(shape.heads * shape.head_dim, shape.layers, shape.ffn, TEXT_DIM)
    merged = {name: PolicySettings("tempcache", sink_frames=SINK, tempcache=PRESETS[name]) for name in ("balanced", "small")}
    cases = {"dense unbounded": (PolicySettings(), None, None), "AnnSA alone": (PolicySettings(), AnnSASettings(), None),
             **{f"all three, {name}": (policy, AnnSASettings(), AnnCASettings()) for name, policy in merged.items()}}
    found: dict[str, dict[int, float]] = {name: {} for name in cases}
    for length in lengths:
        engines = {}
        for name, (policy, annsa, annca) in cases.items():
            engines[name] = ModulesEngine(shape, policy, length, weights)
            engines[name].attach(annsa, annca)
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(REPEATS):
            for name, engine in engines.items():
                times[name].append(engine.cpu_seconds())
        for name in engines:
            found[name][length] = min(times[name])
        calls = {name: engine.run.sparse.report()["calls"] for name, engine in engines.items() if engine.run.sparse is not None}
        say(f"{length:4d} frames  " + "  ".join(f"{name} {found[name][length]:.3f} s" for name in cases) + f"  {calls}")
    return found
