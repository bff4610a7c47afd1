"""LongLive 1: window 12 with sink 3, slot positions ("infinity"), and the recache at a prompt switch, on tiny models."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from core.engine_tools import ListCache
from core.sight import Sight, sight, span
from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.drivers import BlockwisePlan, num_model_calls, run_plan
from fastar_pack.fastar_core.noise import SeededRenoise, seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.sigmas import SigmaSchedule, warp
from tiny.golden import RUN_TOLERANCE
from tiny.plain_engine import PlainEngine
from tiny.wan_plain import dense_attention, wan_forward
from tiny.weights import random_weights

pytestmark = pytest.mark.cpu
WEIGHTS = random_weights(std=0.1, peak=1.7)
HEADS, SHAPE = 4, (1, 16, 30, 8, 8)
SIGMAS = warp((1000, 500), 5.0)
STOCK = PolicySettings("sink_window", 12, 3)
INFINITY = replace(STOCK, positions="slot")
NARROW = PolicySettings("sink_window", 6, 3)
TEXTS = [seeded_normal(40 + i, (1, 16, 64)) for i in range(3)]


@dataclass
class LongLiveOracle:
    """The family's sampler in its plainest form over a list of frames; ``keep``: whether a distant sink outlives a switch."""

    window: int
    switches: tuple[int, ...] = ()
    keep: bool = True
    slot: bool = False
    noise: Tensor = field(default_factory=lambda: seeded_normal(7, SHAPE))
    recache: bool = True
    sink: int = 3

    def prompt(self, frame: int) -> Tensor:
        return TEXTS[sum(frame >= at for at in self.switches)]

    def call(self, x: Tensor, start: int, timestep: float, text: Tensor, write: list[int]) -> Tensor:
        """Frames of the call replace (or join) the stored ones named in ``write``; keys are whatever is stored then, and own ones."""
        count = x.shape[2]
        own = range(start, start + count)
        if write and write[0] not in self.cache.frames:
            seen = self.cache.see(start, count)
        else:
            seen = list(self.cache.frames) if write else self.cache.see(start, count)
        place = {f: i for i, f in enumerate(seen)} if self.slot else {f: f for f in seen}
        last = len(seen) - count
        queries = [last + i if self.slot else f for i, f in enumerate(own)]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            fresh = dict(zip(own, zip(k.chunk(count, 1), v.chunk(count, 1))))
            if write:
                self.cache.store.update({(layer, f): fresh[f] for f in write})
            pairs = [fresh[f] if f in fresh and (not write or f in write) else self.cache.store[layer, f] for f in seen]
            keys = torch.cat([self.rotate(key, place[f]) for f, (key, _) in zip(seen, pairs)], 1)
            query = torch.cat([self.rotate(one, at) for at, one in zip(queries, q.chunk(count, 1))], 1)
            return dense_attention(layer, query, keys, torch.cat([value for _, value in pairs], 1))

        t = torch.full((x.shape[0], count), timestep)
        return wan_forward(WEIGHTS, x, t, text, num_heads=HEADS, attend=attend)

    def rotate(self, x: Tensor, position: int) -> Tensor:
        from tiny.wan_plain import grid_positions, rope_rotate

        return rope_rotate(x, grid_positions(1, self.cache.rows, self.cache.cols, position))

    def switch(self, start: int, out: Tensor) -> None:
        count = min(self.window, start)
        first = start - count
        write = list(range(first, start))
        if not self.keep:
            self.cache.frames = write
        self.call(out[:, :, first:start], first, 0.0, self.prompt(start), [f for f in write if f in self.cache.frames])

    def run(self) -> Tensor:
        self.cache = ListCache(self.window, self.sink, 4, 4)
        out, draw = torch.zeros_like(self.noise), SeededRenoise(3)
        for block, start in enumerate(range(0, self.noise.shape[2], 3)):
            if self.recache and start and self.prompt(start) is not self.prompt(start - 3):
                self.switch(start, out)
            x = self.noise[:, :, start:start + 3]
            for i, sigma in enumerate(SIGMAS):
                x0 = x - sigma * self.call(x, start, 1000 * sigma, self.prompt(start), [])
                if i + 1 < len(SIGMAS):
                    x = (1 - SIGMAS[i + 1]) * x0 + SIGMAS[i + 1] * draw(block, i, x0)
            out[:, :, start:start + 3] = x0
            self.call(x0, start, 0.0, self.prompt(start), list(range(start, start + 3)))
            self.cache.commit(start, 3)
        return out


def plan(switches: tuple[int, ...] = (), recache: int | None = None, **changes: object) -> BlockwisePlan:
    base = BlockwisePlan(seeded_normal(7, SHAPE), SigmaSchedule(SIGMAS), 3, SeededRenoise(3), recache_frames=recache,
                         prompt_at=lambda frame: sum(frame >= at for at in switches))
    return replace(base, **changes)  # type: ignore[arg-type]


def run(settings: PolicySettings, one: BlockwisePlan) -> Tensor:
    engine = PlainEngine(WEIGHTS, TEXTS, HEADS, tuple(one.noise.shape), 3, settings)
    parts = [] if one.prefix is None else [one.prefix]
    return torch.cat(parts + [done.latent for done in run_plan("blockwise", engine, one)], 2)


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


SWITCHES = [(), (6,), (9,), (12,), (24,), (12, 24)]


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize(("settings", "slot"), [(STOCK, False), (INFINITY, True), (NARROW, False)])
def test_equals_the_oracle(settings: PolicySettings, slot: bool, switches: tuple[int, ...]) -> None:
    size = settings.window_frames or 0
    want = LongLiveOracle(size, switches, slot=slot).run()
    assert far(run(settings, plan(switches, size)), want) < RUN_TOLERANCE / 10
    assert want.std() > 0.3


@pytest.mark.parametrize("switches", [(6,), (12,), (24,), (12, 24)])
@pytest.mark.parametrize("settings", [STOCK, NARROW])
def test_equals_the_oracle_with_the_sink_rewritten(settings: PolicySettings, switches: tuple[int, ...]) -> None:
    size = settings.window_frames or 0
    dropped = run(replace(settings, recache="drop"), plan(switches, size))
    assert far(dropped, LongLiveOracle(size, switches, keep=False).run()) < RUN_TOLERANCE / 10
    kept = LongLiveOracle(size, switches).run()
    if switches[-1] > size:
        assert far(dropped, kept) > 20 * RUN_TOLERANCE
    else:
        assert far(dropped, kept) < RUN_TOLERANCE / 10, "p - m = 0: the sink is rewritten in both modes"


@pytest.mark.parametrize("wrong", [
    LongLiveOracle(12, (18,), keep=False), LongLiveOracle(12, (18,), recache=False), LongLiveOracle(12, (18,), slot=True),
    LongLiveOracle(9, (18,)), LongLiveOracle(12, (15,)), LongLiveOracle(12, (18,), sink=0),
])
def test_a_wrong_rule_is_far_away(wrong: LongLiveOracle) -> None:
    assert far(wrong.run(), run(STOCK, plan((18,), 12))) > 20 * RUN_TOLERANCE


def test_without_a_switch_it_is_a_plain_window() -> None:
    """Golden invariant 2: Self-Forcing with window 12 and sink 3."""
    assert torch.equal(run(STOCK, plan((), 12)), run(STOCK, plan()))
    assert torch.equal(run(replace(STOCK, recache="drop"), plan((), 12)), run(STOCK, plan()))


def test_infinity_is_plain_until_something_is_evicted() -> None:
    plain, slots = run(STOCK, plan()), run(INFINITY, plan())
    assert far(plain[:, :, :12], slots[:, :, :12]) < 1e-5
    assert far(plain[:, :, 12:15], slots[:, :, 12:15]) > 20 * RUN_TOLERANCE


@pytest.mark.parametrize(("at", "settings"), [(6, STOCK), (12, STOCK), (15, STOCK), (15, INFINITY), (15, replace(STOCK, recache="drop")),
                                              (15, PolicySettings())])
def test_frames_before_the_switch_are_those_without_it(at: int, settings: PolicySettings) -> None:
    plain = run(settings, plan())
    for mode in (plan((at,), 12), plan((at,), rebuild=True), plan((at,))):
        switched = run(settings, mode)
        assert torch.equal(switched[:, :, :at], plain[:, :, :at])
        assert far(switched[:, :, at:at + 3], plain[:, :, at:at + 3]) > 20 * RUN_TOLERANCE


def test_a_switch_at_the_first_border_is_a_start_from_those_frames() -> None:
    """Golden invariant 10: block 0 given as a prefix under the new prompt gives the same rest, with recache and with rebuild."""
    for mode in ({"recache": 12}, {"rebuild": True}):
        switched = run(STOCK, plan((3,), **mode))  # type: ignore[arg-type]

        def shifted(block: int, step: int, like: Tensor) -> Tensor:
            return SeededRenoise(3)(block + 1, step, like)

        given = plan(prefix=switched[:, :, :3], renoise=shifted, prompt_at=lambda frame: 1)
        assert far(run(STOCK, given), switched) < 1e-5
    assert far(run(STOCK, plan((3,))), switched) > 20 * RUN_TOLERANCE, "without a recache the first block speaks the old prompt"


# -- what attention saw ---------------------------------------------------------------------------------------------------


def switched(settings: PolicySettings, at: int, frames: int | None = 12, total: int = 30, **changes: object) -> Sight:
    return sight(settings, total, recache_frames=frames, prompt_at=lambda frame: int(frame >= at), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [6, 9, 12, 18, 24])
@pytest.mark.parametrize(("settings", "size"), [(STOCK, 12), (NARROW, 6)])
def test_the_recache_pass(at: int, settings: PolicySettings, size: int) -> None:
    run = switched(settings, at, size)
    index = run.told.index(("recache", at - min(size, at), min(size, at)))
    one, before = run.seen[index], run.seen[index - 1]
    assert (before.told, run.seen[index + 1].told) == (("clean", at - 3, 3), ("denoise", at, 3))
    assert one.ctx.prompt_id == 1
    assert one.ctx.timesteps == (0.0,) * min(size, at)
    fed = run.inputs[index]
    assert torch.equal(fed, run.out[:, :, at - min(size, at):at])
    kept = at > size
    stored = span(0, 2) + span(at - size + 3, at - 1) if kept else span(0, at - 1)
    assert one.frames == one.positions == stored
    assert one.queries == span(at - min(size, at), at - 1)
    assert {key.frame for key in one.keys if key.call == index} == set(stored) - (set(span(0, 2)) if kept else set())
    block = run.seen[index + 1]
    assert {key.prompt for key in block.keys if key.frame < 3} == {0 if kept else 1}
    assert {key.prompt for key in block.keys if key.frame >= 3} == {1}


@pytest.mark.parametrize("at", [18, 24])
def test_the_recache_pass_with_the_sink_dropped(at: int) -> None:
    run = switched(replace(STOCK, recache="drop"), at)
    block = run.seen[run.told.index(("denoise", at, 3))]
    assert block.frames == block.positions == span(at - 12, at - 10) + span(at - 6, at + 2)
    assert {key.prompt for key in block.keys} == {1}


def test_a_rebuild_keeps_the_chunks_of_the_first_time() -> None:
    run = switched(STOCK, 18, None, rebuild=True, prefix=4)
    first = next(i for i, one in enumerate(run.seen) if one.ctx.phase == "prefill" and one.ctx.prompt_id == 1)
    chunks = [(0, 3), (3, 1), *[(s, 3) for s in range(4, 19, 3)]]
    assert run.told[first:first + 8] == [*[("prefill", s, n) for s, n in chunks], ("denoise", 19, 3)]


@pytest.mark.parametrize("settings", [PolicySettings(), STOCK, INFINITY])
def test_after_a_rebuild_nothing_of_the_old_prompt_is_left(settings: PolicySettings) -> None:
    run = switched(settings, 18, None, rebuild=True)
    first = next(i for i, one in enumerate(run.seen) if one.ctx.phase == "prefill")
    assert run.told[first:first + 7] == [*[("prefill", s, 3) for s in range(0, 18, 3)], ("denoise", 18, 3)]
    assert all(torch.equal(run.inputs[first + i], run.out[:, :, 3 * i:3 * i + 3]) for i in range(6))
    for one in run.seen[first:]:
        assert {key.prompt for key in one.keys} == {1}
    plain = sight(settings, 30)
    assert run.seen[first + 6].frames == plain.seen[plain.told.index(("denoise", 18, 3))].frames
    assert run.seen[first + 6].positions == plain.seen[plain.told.index(("denoise", 18, 3))].positions


@pytest.mark.parametrize("mode", [{"recache_frames": 12}, {"rebuild": True}, {}])
@pytest.mark.parametrize("switches", [(), (1,), (12,), (12, 20), (29,), (40,)])
@pytest.mark.parametrize("prefix", [0, 4])
def test_calls_are_counted_beforehand(mode: dict[str, object], switches: tuple[int, ...], prefix: int) -> None:
    run = sight(PolicySettings(), 30, prefix=prefix, prompt_at=lambda frame: sum(frame >= at for at in switches), **mode)  # type: ignore[arg-type]
    assert num_model_calls("blockwise", run.plan) == len(run.seen)


def test_every_layer_reads_the_current_prompt() -> None:
    """Also in the recache pass: the rows that cross-attention of every layer was given are those of the call's prompt."""
    seen: list[tuple[int, int]] = []

    class Listening(PlainEngine):
        def velocity(self, x: Tensor, ctx: FwdCtx) -> Tensor:
            policy = self.run.policy("positive")

            def cross(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                match = [i for i, text in enumerate(TEXTS) if torch.equal(v, self.values(layer, text))]
                assert match == [ctx.prompt_id]
                seen.append((layer, match[0]))
                return dense_attention(layer, q, k, v)

            t = torch.tensor(ctx.timesteps)[None].expand(x.shape[0], -1)
            return wan_forward(WEIGHTS, x, t, self.prompts[int(ctx.prompt_id)], num_heads=HEADS, cross=cross,  # type: ignore[call-overload]
                               attend=lambda layer, q, k, v: policy.attend(layer, q, k, v, ctx))

        def values(self, layer: int, text: Tensor) -> Tensor:
            from tiny.wan_plain import embed_text

            name = f"blocks.{layer}.cross_attn.v"
            rows = embed_text(WEIGHTS, text)
            return torch.nn.functional.linear(rows, WEIGHTS[name + ".weight"], WEIGHTS[name + ".bias"]).unflatten(-1, (HEADS, -1))

    one = plan((12, 24), 12)
    engine = Listening(WEIGHTS, TEXTS, HEADS, SHAPE, 3, STOCK, keep_calls=True)
    list(run_plan("blockwise", engine, one))
    assert len(seen) == 2 * num_model_calls("blockwise", one)
    assert [(c.start, c.prompt_id) for c, _, _ in engine.record if c.phase == "recache"] == [(0, 1), (12, 2)]


def test_infinity_never_leaves_the_window_in_1100_blocks() -> None:
    """3,300 latent frames; a table of 1,024 positions, or the host's own in bfloat16, would have failed long before."""
    run = sight(INFINITY, 3300, (1.0,), positions=16, layers=1)
    assert len(run.of("denoise")) == 1100
    steady = [one for one in run.seen if one.ctx.start >= 12]
    assert all(one.positions == span(0, 11) for one in steady)
    assert all(one.queries == span(9, 11) for one in steady)
    assert run.seen[-1].frames == span(0, 2) + span(3291, 3299)
    with pytest.raises(AssertionError, match="no whole position"):
        sight(STOCK, 60, (1.0,), positions=16)
