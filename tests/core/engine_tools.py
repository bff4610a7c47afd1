"""Tools for engine tests: tiny random Wan weights, rollouts, an uncached oracle, and a probe that shows what attention saw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastar_pack.fastar_core.context import FwdCtx, Phase
from fastar_pack.fastar_core.drivers.blockwise import BlockwisePlan, run_blockwise
from fastar_pack.fastar_core.geometry import Block, RunGeometry, token_grid
from fastar_pack.fastar_core.noise import SeededRenoise, seeded_normal
from fastar_pack.fastar_core.policies import CachePolicy, PolicySettings
from fastar_pack.fastar_core.positions import RopeSpec
from fastar_pack.fastar_core.runstate import RunState
from fastar_pack.fastar_core.sigmas import SigmaSchedule
from tiny.plain_engine import PlainEngine
from tiny.wan_plain import dense_attention, grid_positions, rope_rotate, wan_forward

DIM, HEADS, LAYERS, FFN, TEXT, CHANNELS = 48, 2, 2, 64, 8, 4
SCHEDULE = SigmaSchedule((1.0, 0.625))
FULL = PolicySettings()


def window(frames: int, sink: int = 0, **changes: object) -> PolicySettings:
    return PolicySettings("sink_window", frames, sink, **changes)


def tiny_weights(seed: int = 1, std: float = 0.15, channels: int = CHANNELS) -> dict[str, Tensor]:
    """A native state dict of 2 layers; attention is peaked enough that every wrong rule shows."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "patch_embedding": (DIM, channels, 1, 2, 2),
        "text_embedding.0": (DIM, TEXT),
        "text_embedding.2": (DIM, DIM),
        "time_embedding.0": (DIM, 256),
        "time_embedding.2": (DIM, DIM),
        "time_projection.1": (6 * DIM, DIM),
        "head.head": (channels * 4, DIM),
    }
    plain: dict[str, tuple[int, ...]] = {"head.modulation": (1, 2, DIM)}
    for layer in range(LAYERS):
        name = f"blocks.{layer}"
        plain[name + ".modulation"] = (1, 6, DIM)
        for kind in ("self_attn", "cross_attn"):
            shapes |= {f"{name}.{kind}.{part}": (DIM, DIM) for part in "qkvo"}
        shapes |= {name + ".ffn.0": (FFN, DIM), name + ".ffn.2": (DIM, FFN)}
    weights = {}
    for name, shape in shapes.items():
        weights[name + ".weight"] = std * torch.randn(shape, generator=generator)
        weights[name + ".bias"] = std * torch.randn(shape[:1], generator=generator)
    weights |= {name: std * torch.randn(shape, generator=generator) for name, shape in plain.items()}
    for layer in range(LAYERS):
        for kind in ("self_attn", "cross_attn"):
            weights |= {f"blocks.{layer}.{kind}.norm_{part}.weight": torch.full((DIM,), 1.5) for part in "qk"}
        weights |= {f"blocks.{layer}.norm3.weight": torch.ones(DIM), f"blocks.{layer}.norm3.bias": torch.zeros(DIM)}
    return weights


@dataclass
class Rollout:
    """One run of the plain engine: everything that went into and came out of the model."""

    shape: tuple[int, ...]
    block: int
    settings: PolicySettings
    prefix: int = 0
    schedule: SigmaSchedule = SCHEDULE
    seed: int = 5
    calls: list[tuple[Tensor, FwdCtx, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weights = tiny_weights()
        self.text = seeded_normal(99, (self.shape[0], 5, TEXT))
        self.engine = PlainEngine(self.weights, [self.text], HEADS, self.shape, self.block, self.settings, keep_calls=True)
        clean = seeded_normal(77, self.shape)[:, :, : self.prefix]
        self.plan = BlockwisePlan(
            seeded_normal(self.seed, self.shape),
            self.schedule,
            self.block,
            SeededRenoise(self.seed),
            clean if self.prefix else None,
            clean_last=True,
        )

    def call(self, x: Tensor, ctx: FwdCtx) -> Tensor:
        x0 = self.engine(x, ctx)
        self.calls.append((x, ctx, self.engine.record[-1][2]))
        return x0

    def run(self) -> Tensor:
        """Latents [B, C, T, h, w], the prefix included."""
        parts = [] if self.plan.prefix is None else [self.plan.prefix]
        return torch.cat(parts + [done.latent for done in run_blockwise(self.call, self.plan)], dim=2)


def uncached_velocity(rollout: Rollout, clean: Tensor, x: Tensor, ctx: FwdCtx, units: Callable[[int], int]) -> Tensor:
    """Velocity of the call's frames from one forward over [clean frames before it at t = 0, x at t] without any cache.

    ``units`` maps a latent frame to its block; a query sees every key whose block is not later than its own.
    """
    frames = torch.cat([clean[:, :, : ctx.start], x], dim=2)
    t = torch.tensor((0.0,) * ctx.start + ctx.timesteps)[None].expand(x.shape[0], -1)
    rows, cols = token_grid(*x.shape[3:])
    positions = grid_positions(ctx.end, rows, cols)
    unit = torch.tensor([units(f) for f in range(ctx.end)]).repeat_interleave(rows * cols)
    mask = unit[:, None] >= unit[None, :]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (rope_rotate(t, positions).transpose(1, 2) for t in (q, k))
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)

    v = wan_forward(rollout.weights, frames, t, rollout.text, num_heads=HEADS, attend=attend)
    return v[:, :, ctx.start :]


class Probe:
    """Drives one policy without a model.

    Keys and queries are zero, so attention is a plain mean, and the value of a frame is a one-hot: the output spells out which
    frames were attended to, and how often. ``version`` tells frames that were written again (recache) from the first writing.
    """

    def __init__(self, settings: PolicySettings, total: int, block: int, rows: int = 1, cols: int = 2, tags: int = 128) -> None:
        self.total, self.rows, self.cols, self.tags, self.layers = total, rows, cols, tags, 2
        self.geometry = RunGeometry(total, block, rows, cols, self.layers)
        self.run = RunState(settings, self.geometry, RopeSpec(64))
        self.tokens = rows * cols

    @property
    def policy(self) -> CachePolicy:
        return self.run._policies["p"]  # its existence before the first call is of no interest

    def ctx(self, phase: Phase, start: int, count: int) -> FwdCtx:
        return FwdCtx(phase, start, count, (0.5,) * count, (500.0,) * count, self.rows, self.cols)

    def call(self, phase: Phase, start: int, count: int, version: int = 0) -> tuple[int, ...]:
        """Frames attended to, ascending; a frame of version 1 counts as total + frame."""
        ctx = self.ctx(phase, start, count)
        self.run.begin(ctx)
        policy = self.run.policy("p")
        index = torch.arange(start, start + count) + version * self.total
        assert int(index.max()) < self.tags, "the probe is too narrow for this run"
        value = torch.nn.functional.one_hot(index, self.tags).float().repeat_interleave(self.tokens, 0)
        value = value.view(1, -1, self.tags // 64, 64)
        zero = torch.zeros_like(value)
        outs = [policy.attend(layer, zero, zero, value, ctx).flatten(2) for layer in range(self.layers)]
        self.run.end()
        assert all(torch.equal(outs[0], out) for out in outs)
        weights = outs[0][0]
        assert torch.allclose(weights, weights[:1].expand_as(weights), atol=1e-6), "queries of one call see the same keys"
        seen = weights[0].nonzero().flatten().tolist()
        assert torch.allclose(weights[0, seen], torch.full((len(seen),), 1 / len(seen)), atol=1e-6), "each frame counts once"
        return tuple(seen)

    def block(self, start: int, count: int) -> tuple[int, ...]:
        """A denoise call and the clean pass: both must see the same frames."""
        seen = self.call("denoise", start, count)
        assert self.call("clean", start, count) == seen
        return seen

    def advance(self, blocks: list[Block]) -> list[tuple[int, ...]]:
        return [self.block(b.start, b.num_frames) for b in blocks]


@dataclass
class ListCache:
    """The reference samplers' window in its plainest form: a list of frames; when too long, frames behind the sink go."""

    window: int
    sink: int
    rows: int
    cols: int
    slot_positions: bool = False
    frames: list[int] = field(default_factory=list)
    store: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def see(self, start: int, count: int) -> list[int]:
        listed = self.frames + list(range(start, start + count))
        surplus = max(0, len(listed) - self.window)
        return listed[: self.sink] + listed[self.sink + surplus :]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, start: int, commit: bool) -> Tensor:
        count = q.shape[1] // (self.rows * self.cols)
        seen = self.see(start, count)
        own = dict(zip(range(start, start + count), zip(k.chunk(count, 1), v.chunk(count, 1))))
        pairs = [own[f] if f in own else self.store[layer, f] for f in seen]
        place = {f: i for i, f in enumerate(seen)} if self.slot_positions else {f: f for f in seen}

        def rotate(x: Tensor, frame: int) -> Tensor:
            return rope_rotate(x, grid_positions(1, self.rows, self.cols, place[frame]))

        keys = torch.cat([rotate(key, f) for f, (key, _) in zip(seen, pairs)], 1)
        queries = torch.cat([rotate(x, f) for f, x in zip(own, q.chunk(count, 1))], 1)
        if commit:
            self.store |= {(layer, f): pair for f, pair in own.items()}
        return dense_attention(layer, queries, keys, torch.cat([value for _, value in pairs], 1))

    def commit(self, start: int, count: int) -> None:
        self.frames = self.see(start, count)


def random_qkv(seed: int, tokens: int, batch: int = 1, heads: int = 2, head_dim: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = seeded_normal(seed, (3, batch, tokens, heads, head_dim)).unbind(0)
    return 2 * q, 2 * k, v
