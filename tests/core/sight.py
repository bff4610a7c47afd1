"""Shows what attention really saw and where: a ModelCall without a model, whose keys spell out their frame and position.

Keys and queries are made of pairs (1, 0), so after the rotation each pair holds cos and sin of its angle, from which the position
is read back. Values carry the frame number, the number of the call that wrote them, and the prompt of that call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.drivers import BlockwisePlan, LoopKind, longest_call, run_plan
from fastar_pack.fastar_core.geometry import RunGeometry, token_grid
from fastar_pack.fastar_core.noise import SeededRenoise, seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.positions import RopeSpec, Rotary
from fastar_pack.fastar_core.runstate import RunState
from fastar_pack.fastar_core.sigmas import SigmaSchedule

HEAD_DIM = 48


def span(first: int, last: int) -> tuple[int, ...]:
    """Frames first .. last."""
    return tuple(range(first, last + 1))


@dataclass(frozen=True)
class Key:
    """One latent frame among the keys: who it is, where it stands, which call wrote it under which prompt."""

    frame: int
    position: int
    call: int
    prompt: int


@dataclass(frozen=True)
class Seen:
    """One model call as attention saw it; ``keys`` ascending by frame."""

    ctx: FwdCtx
    queries: tuple[int, ...]
    keys: tuple[Key, ...]

    @property
    def frames(self) -> tuple[int, ...]:
        return tuple(key.frame for key in self.keys)

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(key.position for key in self.keys)

    @property
    def old(self) -> tuple[int, ...]:
        """Frames from before the call."""
        return tuple(f for f in self.frames if not self.ctx.start <= f < self.ctx.end)

    @property
    def told(self) -> tuple[str, int, int]:
        return self.ctx.phase, self.ctx.start, self.ctx.num_frames


@dataclass
class Sight:
    """A ModelCall: x0 = x / 2, and a note of what every layer saw (all layers must see the same)."""

    settings: PolicySettings
    plan: BlockwisePlan
    loop: LoopKind = "blockwise"
    positions: int = 64
    layers: int = 2
    seen: list[Seen] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    origin: int = 0

    def __post_init__(self) -> None:
        shape = self.plan.noise.shape
        self.rows, self.cols = token_grid(*shape[3:])
        self.tokens = self.rows * self.cols
        geometry = RunGeometry(shape[2], self.plan.block, self.rows, self.cols, self.layers, longest_call(self.loop, self.plan))
        self.run = RunState(self.settings, geometry, RopeSpec(HEAD_DIM))
        self.run.attention.attend = self._attend  # type: ignore[method-assign]
        self._unit = torch.tensor([1.0, 0.0]).repeat(HEAD_DIM // 2)
        table = Rotary(RopeSpec(HEAD_DIM), self.rows, self.cols).rotate(
            self._unit.expand(1, self.positions * self.tokens, 1, HEAD_DIM), range(self.positions))
        self._table = table[0, :, 0].unflatten(0, (self.positions, self.tokens))
        self._noted: Seen | None = None

    def __call__(self, x: Tensor, ctx: FwdCtx) -> Tensor:
        self.inputs.append(x)
        batch, number = x.shape[0], len(self.seen)
        self.run.begin(ctx)
        policy = self.run.policy("p")
        frames = torch.arange(ctx.start, ctx.end).repeat_interleave(self.tokens)
        value = torch.zeros(batch, len(frames), 1, HEAD_DIM)
        value[..., 0, 0], value[..., 0, 1], value[..., 0, 2] = frames.float(), number, int(ctx.prompt_id)  # type: ignore[call-overload]
        unit = self._unit.expand(batch, len(frames), 1, HEAD_DIM)
        notes = []
        for layer in range(self.layers):
            policy.attend(layer, unit, unit, value, ctx)
            assert self._noted is not None
            notes.append(self._noted)
        assert all(note == notes[0] for note in notes), "layers of one call see different things"
        self.run.end()
        self.seen.append(notes[0])
        return x / 2

    def _read(self, rotated: Tensor) -> list[int]:
        """Positions of the frames of rotated pairs [B, n * S, 1, D]; every token must stand on its own cell of that frame."""
        assert torch.equal(rotated, rotated[:1].expand_as(rotated)), "rows of the batch stand at different places"
        found = []
        for one in rotated[0, :, 0].unflatten(0, (-1, self.tokens)):
            distance = (self._table - one).abs().amax((1, 2))
            assert distance.min() < 1e-3, "a key stands at no whole position"
            found.append(int(distance.argmin()))
        return found

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, **_: object) -> Tensor:
        assert bias is None
        assert self.run.ctx is not None
        labels = v[0, ::self.tokens, 0, :3].long().tolist()
        whole = v[0, :, 0, :3].unflatten(0, (-1, self.tokens))
        assert torch.equal(whole, whole[:, :1].expand_as(whole)), "tokens of different frames are mixed up"
        keys = [Key(frame, position, call, prompt) for (frame, call, prompt), position in zip(labels, self._read(k))]
        assert len({key.frame for key in keys}) == len(keys), "a frame is seen twice"
        self._noted = Seen(self.run.ctx, tuple(self._read(q)), tuple(sorted(keys, key=lambda key: key.frame)))
        return torch.zeros_like(q)

    def go(self) -> Sight:
        """Runs the plan; ``out`` holds the latents."""
        self.out = torch.cat([done.latent for done in run_plan(self.loop, self, self.plan)], 2)
        return self

    @property
    def told(self) -> list[tuple[str, int, int]]:
        return [one.told for one in self.seen]

    def of(self, phase: str) -> list[Seen]:
        return [one for one in self.seen if one.ctx.phase == phase]


def sight(settings: PolicySettings, frames: int, sigmas: Sequence[float] = (1.0, 0.5), loop: LoopKind = "blockwise", *,
          block: int = 3, size: tuple[int, int] = (2, 4), batch: int = 1, prefix: int = 0, positions: int = 64, layers: int = 2,
          **changes: object) -> Sight:
    """A finished run over ``frames`` latent frames of ``size`` latent rows and columns."""
    noise = seeded_normal(0, (batch, 2, frames, *size))
    clean = seeded_normal(1, (batch, 2, prefix, *size)) if prefix else None
    plan = BlockwisePlan(noise, SigmaSchedule(tuple(sigmas)), block, SeededRenoise(0), clean, **changes)  # type: ignore[arg-type]
    return Sight(settings, plan, loop, positions, layers).go()
