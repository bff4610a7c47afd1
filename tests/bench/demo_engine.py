"""The demo model driven by the pack's own engine, for measuring cache policies: long tours, dense run, lockstep."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from demo import text, world
from demo.data import Bank
from demo.model import HEADS, SIGMAS
from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.drivers import BlockwisePlan, run_plan
from fastar_pack.fastar_core.geometry import RunGeometry
from fastar_pack.fastar_core.noise import SeededRenoise, seeded_normal
from fastar_pack.fastar_core.policies import CachePolicy, PolicySettings
from fastar_pack.fastar_core.positions import RopeSpec
from fastar_pack.fastar_core.runstate import RunState
from fastar_pack.fastar_core.sigmas import SigmaSchedule
from tiny.wan_plain import layer_count, wan_forward

MODELS = Path(__file__).resolve().parents[2] / "example_workflows" / "models"
BLOCK, GRID, PREFIX = 3, 8, 1
HELD_OUT = 9_000_000
SCHEDULE = SigmaSchedule(SIGMAS)


@dataclass
class Weights:
    """float32 weights of the diffusion model and the text encoder."""

    dit: dict[str, torch.Tensor]
    text: dict[str, torch.Tensor]

    @property
    def num_layers(self) -> int:
        return layer_count(self.dit)


def load_weights(checkpoint: Path | None = None) -> Weights:
    """The shipped demo models, or a training checkpoint (averaged weights under "weights")."""
    if checkpoint is None:
        dit = load_file(MODELS / "diffusion_models" / "fastar_demo_dit.safetensors")
        words = load_file(MODELS / "fastar_demo" / "fastar_demo_text.safetensors")
        floats = [{k: v.float() for k, v in part.items() if v.is_floating_point()} for part in (dit, words)]
        return Weights(*floats)
    held = torch.load(checkpoint, weights_only=True)["weights"]
    parts = [{k[len(p):]: v.float() for k, v in held.items() if k.startswith(p)} for p in ("dit.", "text.")]
    return Weights(*parts)


def long_tour(seed: int, num_blocks: int, max_places: int = 12) -> list[world.Block]:
    """Stays of 1 to 4 blocks; from then on returns to places shown before in 6 of 10 moves, in all once ``max_places`` are known."""
    rng = random.Random(HELD_OUT + seed)
    journey = world.Journey(rng, fillers=0)
    blocks = [journey.arrive(journey.new_name())]
    while len(blocks) < num_blocks:
        blocks += [journey.stay() for _ in range(rng.randint(0, 3))]
        known = [name for name in journey.shown if name != journey.here]
        back = len(journey.shown) >= max_places or (known and rng.random() < 0.6)
        target = rng.choice(known) if back else journey.new_name()
        blocks.append(journey.slide(target) if rng.random() < 0.6 else journey.arrive(target))
    return blocks[:num_blocks]


class Tour:
    """A tour's prompts and true latents [1, 16, 1 + 3 n, 16, 16], the slate first."""

    def __init__(self, bank: Bank, blocks: Sequence[world.Block]) -> None:
        self.blocks = list(blocks)
        self.ids = [text.batch_ids([block.prompt], bank.words) for block in self.blocks]
        self.truth = torch.cat([bank.slate[:, None], *map(bank.frames, self.blocks)], 1)[None]
        self.slate = self.truth[:, :, :PREFIX]

    @property
    def total_frames(self) -> int:
        return self.truth.shape[2]

    def block_at(self, frame: int) -> int:
        """Number of the block that latent frame ``frame`` belongs to (the slate belongs to block 0)."""
        return max(0, (frame - PREFIX) // BLOCK)


class DemoEngine:
    """A ModelCall over the demo model with one cache policy; ``policy`` is made at the first call (and can be wrapped)."""

    def __init__(self, weights: Weights, tour: Tour, settings: PolicySettings) -> None:
        self.weights, self.tour = weights, tour
        geometry = RunGeometry(tour.total_frames, BLOCK, GRID, GRID, weights.num_layers)
        self.run = RunState(settings, geometry, RopeSpec(weights.dit["head.modulation"].shape[-1] // HEADS))
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def policy(self) -> CachePolicy:
        return self.run.policy("positive")

    def _text(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if number not in self._rows:
            ids = self.tour.ids[number]
            self._rows = {number: (text.encode(self.weights.text, ids), text.pad_bias(ids)[:, None, None])}
        return self._rows[number]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: FwdCtx) -> torch.Tensor:
        return self.policy().attend(layer, q, k, v, ctx)

    @torch.no_grad()
    def __call__(self, x: torch.Tensor, ctx: FwdCtx) -> torch.Tensor:
        rows, bias = self._text(self.tour.block_at(ctx.start))

        def cross(_: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            swapped = (t.transpose(1, 2) for t in (q, k, v))
            return torch.nn.functional.scaled_dot_product_attention(*swapped, attn_mask=bias).transpose(1, 2)

        self.run.begin(ctx)
        v = wan_forward(self.weights.dit, x, torch.tensor([ctx.timesteps]), rows, num_heads=HEADS, cross=cross,
                        attend=lambda layer, q, k, v: self.attend(layer, q, k, v, ctx))
        self.run.end()
        return x - torch.tensor(ctx.sigmas)[None, None, :, None, None] * v


def make_plan(tour: Tour, seed: int, start_noise_change: float = 0.0) -> BlockwisePlan:
    """The plan of a rollout; ``start_noise_change`` adds that much relative noise to the start noise (the chaos floor)."""
    noise = seeded_normal(seed, tour.truth.shape)
    if start_noise_change:
        noise = (noise + start_noise_change * seeded_normal(seed + 1, tour.truth.shape)) / (1 + start_noise_change**2) ** 0.5
    return BlockwisePlan(noise, SCHEDULE, BLOCK, SeededRenoise(seed), prefix=tour.slate, prompt_at=tour.block_at)


def rollout(engine: DemoEngine, plan: BlockwisePlan) -> torch.Tensor:
    """Latents [1, 16, T, 16, 16] of a free-running rollout, the slate first."""
    return torch.cat([engine.tour.slate, *(done.latent for done in run_plan("blockwise", engine, plan))], 2)


def lockstep(engine: DemoEngine, plan: BlockwisePlan, clean: torch.Tensor,
             measured: Sequence[int] | None = None) -> dict[int, torch.Tensor]:
    """Blocks denoised by ``engine`` while its history is fed with ``clean`` latents; {block number: latent [1, 16, 3, 16, 16]}.

    ``measured``: numbers of the blocks that are denoised (the others are only committed); None = all.
    """
    found = {}
    engine(plan.prefix, plan.context("prefill", 0, PREFIX, 0.0, 0.0))  # type: ignore[arg-type]
    for block in plan.blocks:
        span = slice(block.start, block.start + block.num_frames)
        if measured is None or block.index in measured:
            found[block.index] = _denoise(engine, plan, block.start, block.index, block.num_frames)
        engine(clean[:, :, span], plan.context("clean", block.start, block.num_frames, 0.0, 0.0, 0, block.index))
    return found


def _denoise(engine: DemoEngine, plan: BlockwisePlan, start: int, index: int, count: int) -> torch.Tensor:
    x = plan.noise[:, :, start:start + count]
    steps = plan.schedule.for_block(index)
    for i, (sigma, timestep) in enumerate(steps):
        x0 = engine(x, plan.context("denoise", start, count, sigma, timestep, i, index))
        if i + 1 < len(steps):
            following = steps[i + 1][0]
            x = (1 - following) * x0 + following * plan.renoise(index, i, x0)
    return x0
