"""The demo model with AnnCA and AnnSA attached, and engines that also measure what the two keep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import torch

from bench.demo_engine import SCHEDULE, DemoEngine, Tour, Weights
from demo import text
from demo.model import HEADS
from fastar_pack.fastar_core.annca import AnnCASettings, PromptPruner
from fastar_pack.fastar_core.annca.pruner import PromptCall
from fastar_pack.fastar_core.annsa import AnnSASettings, SparseAttention
from fastar_pack.fastar_core.annsa.key_buffer import KeyBuffer
from fastar_pack.fastar_core.annsa.walk import Queries, Walk, kept_mass
from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.policies import PolicySettings
from tiny.wan_plain import dense_attention, wan_forward

PROMPT_ROWS = 512
LONG_PROMPT = 9
SHORTEST = 4


class MeasuredSparse(SparseAttention):
    """Notes the attention mass that sparse calls keep, mean and per head, for the blocks in ``measured``."""

    def __init__(self, settings: AnnSASettings, measured: set[int]) -> None:
        super().__init__(settings, SCHEDULE.sigmas)
        self.measured = measured
        self.heads: list[torch.Tensor] = []

    def _finish(self, walk: Walk, queries: Queries, buffer: KeyBuffer, layer: int, sigma: float, moment: int) -> torch.Tensor | None:
        if not self.settings.calibrate:
            mass = kept_mass(walk, queries, buffer, 1000 * moment + layer)
            self.tally.recall(layer, mass)
            self.heads.append(mass.flatten())
        return super()._finish(walk, queries, buffer, layer, sigma, moment)

    def result(self) -> dict[str, float]:
        """Recall over heads and calls, its 5th percentile, densities."""
        told: dict[str, Any] = self.report()
        found = {key: float(told[key]) for key in ("density", "density_floor", "density_all_denoise_calls") if key in told}
        if self.heads:
            mass = torch.cat(self.heads)
            found |= {"recall": float(mass.mean()), "recall_p5": float(mass.quantile(0.05))}
        return found


class SparseEngine(DemoEngine):
    """``annsa`` and ``annca`` None = left out. The prompt is padded to 512 zero rows, as the host's text encoder does."""

    def __init__(self, weights: Weights, tour: Tour, policy: PolicySettings, measured: set[int], annsa: AnnSASettings | None = None,
                 annca: AnnCASettings | None = None) -> None:
        super().__init__(weights, tour, policy)
        self.measured = measured
        if annsa is not None:
            self.run.sparse = self.run.attention.sparse = MeasuredSparse(annsa, measured)
        if annca is not None:
            self.run.prompts = PromptPruner(annca, self.run.attention, SCHEDULE.sigmas)
        self.kept: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
        self._padded: dict[int, tuple[torch.Tensor, int]] = {}

    def _prompt(self, number: int) -> tuple[torch.Tensor, int]:
        """Text rows [1, 512, 4096] and the number of words."""
        if number not in self._padded:
            ids = self.tour.ids[number]
            rows = text.encode(self.weights.text, ids)
            self._padded = {number: (torch.nn.functional.pad(rows, (0, 0, 0, PROMPT_ROWS - rows.shape[1])), int((ids != text.PAD).sum()))}
        return self._padded[number]

    @torch.no_grad()
    def __call__(self, x: torch.Tensor, ctx: FwdCtx) -> torch.Tensor:
        number = self.tour.block_at(ctx.start)
        rows, words = self._prompt(number)
        run = self.run
        run.begin(ctx)
        if run.prompts is not None:
            run.prompts.start_call(rows, [("prompt", number)], PromptCall(max(ctx.sigmas), ctx.num_frames, (ctx.block, ctx.start)))

        def cross(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if run.sparse is not None and run.sparse.shared is not None:
                run.sparse.shared.note(self.policy(), layer, q, ctx)
            out = None if run.prompts is None else run.prompts.attend(layer, q, k, v)
            if run.prompts is not None and run.prompts.settings.keep != "all" and ctx.block in self.measured and ctx.phase == "denoise":
                self._note_kept((layer, (("prompt", number),)), q, k, words, ctx)
            return dense_attention(layer, q, k, v) if out is None else out

        v = wan_forward(self.weights.dit, x, torch.tensor([ctx.timesteps]), rows, num_heads=HEADS, cross=cross,
                        attend=lambda layer, q, k, v: self.attend(layer, q, k, v, ctx))
        run.end()
        return x - torch.tensor(ctx.sigmas)[None, None, :, None, None] * v

    def _note_kept(self, key: Hashable, q: torch.Tensor, k: torch.Tensor, words: int, ctx: FwdCtx) -> None:
        """Per frame: mass on kept words (over words only), share of words kept, mass on as many random and on as many best words."""
        kept = None if self.run.prompts is None else self.run.prompts._kept.get(key)
        if kept is None or words < SHORTEST:
            return
        for frame, queries in enumerate(q[0].chunk(ctx.num_frames)):
            mass = torch.einsum("qhd,khd->hqk", queries, k[0, :words]).div(q.shape[-1] ** 0.5).softmax(-1).mean((0, 1))
            shown = kept.index[frame][kept.bias[frame] > -torch.inf]
            shown = shown[shown < words]
            drawn = torch.randperm(words, generator=torch.Generator().manual_seed(ctx.start + frame))[:len(shown)]
            best = mass.topk(len(shown)).values
            entry = (float(mass[shown].sum()), len(shown) / words, float(mass[drawn].sum()), float(best.sum()))
            self.kept["all prompts"].append(entry)
            if words >= LONG_PROMPT:
                self.kept["long prompts"].append(entry)

    def prompt_result(self, which: str) -> dict[str, float]:
        """Mean recall over words, share kept, recall of as many random words and of the best that could be chosen."""
        found = torch.tensor(self.kept[which]) if self.kept[which] else torch.full((1, 4), torch.nan)
        names = ("recall", "density", "recall_random", "recall_best")
        return dict(zip(names, found.mean(0).tolist()))
