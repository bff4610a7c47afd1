"""CausVid and Krea: when a timeline starts over, from which latents, under which prompt, and at which positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core.sight import Sight, sight, span
from fastar_pack.fastar_core.drivers import BlockwisePlan, Restart, num_model_calls, run_plan
from fastar_pack.fastar_core.noise import SeededRenoise, seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.presets import get_preset, schedule
from fastar_pack.fastar_core.sigmas import SigmaSchedule
from tiny.golden import RUN_TOLERANCE
from tiny.plain_engine import PlainEngine
from tiny.wan_plain import dense_attention, grid_positions, rope_rotate, wan_forward
from tiny.weights import random_weights

pytestmark = pytest.mark.cpu
KREA = PolicySettings("sink_window", 6, 0)
CAUSVID = PolicySettings("sink_window", 21, 0)


class Stub:
    """An anchor that notes what it was asked for: the n-th call gives latents of value 100 + n."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.asked: list[int] = []
        self.shape = shape

    def __call__(self, pixel_from_end: int) -> Tensor:
        self.asked.append(pixel_from_end)
        return torch.full(self.shape, 100.0 + len(self.asked))


def krea(frames: int = 15, context: int = 3, settings: PolicySettings = KREA, keep_first: bool = False,
         **changes: object) -> tuple[Sight, Stub]:
    stub = Stub((changes.get("batch", 1), 2, 1, 2, 4))  # type: ignore[arg-type]
    rule = Restart(context + 3, context, 4 * (context - 1) + 1, stub, keep_first)
    return sight(settings, frames, (1.0, 0.5), restart=rule, **changes), stub  # type: ignore[arg-type]


def contexts(run: Sight) -> list[list[float | Tensor]]:
    """The latents of each restart, chunks joined."""
    found: list[Tensor] = []
    for one, x in zip(run.seen, run.inputs):
        if one.ctx.phase == "prefill":
            found = [*found, x] if one.ctx.start == 0 else [*found[:-1], torch.cat([found[-1], x], 2)]
    return found  # type: ignore[return-value]


def test_order_of_calls_of_krea() -> None:
    run, stub = krea()
    block = [("denoise", 3, 3)] * 2
    assert run.told == [*[("denoise", 0, 3)] * 2, ("clean", 0, 3), *block, *[("prefill", 0, 3), *block] * 3]
    assert stub.asked == [9, 9, 9], "the oldest of the last 1 + 4 (n - 1) pixel frames: the fourth of a block's twelve"
    assert num_model_calls("blockwise", run.plan) == len(run.seen)


def test_contexts_of_krea() -> None:
    run, _ = krea()
    for number, context in enumerate(contexts(run), start=1):
        end = 3 + 3 * number
        assert torch.equal(context[:, :, :1], torch.full((1, 2, 1, 2, 4), 100.0 + number))  # type: ignore[index]
        assert torch.equal(context[:, :, 1:], run.out[:, :, end - 2:end])  # type: ignore[index]


def test_positions_of_krea_are_bounded() -> None:
    run, _ = krea(30)
    for one in run.seen:
        assert one.frames == one.positions == span(0, one.ctx.end - 1)
        assert one.ctx.end <= 6
        if one.ctx.phase == "denoise" and one.ctx.start:
            assert {run.seen[key.call].ctx.phase for key in one.keys if key.frame < 3} <= {"clean", "prefill"}
            assert one.queries == span(3, 5)


def test_the_clean_pass_before_block_1_equals_its_recomputed_context() -> None:
    """Krea recomputes frames 0 .. 2 before block 1; the pass that block 0 already got is the same call at the same place."""
    run, _ = krea(9)
    clean = run.seen[2]
    assert clean.told == ("clean", 0, 3)
    assert clean.frames == clean.positions == span(0, 2)
    assert clean.ctx.timesteps == (0.0,) * 3
    assert torch.equal(run.inputs[2], run.out[:, :, :3])


def test_keep_first_uses_the_true_first_latent() -> None:
    run, stub = krea(keep_first=True)
    assert stub.asked == []
    assert all(torch.equal(context[:, :, :1], run.out[:, :, :1]) for context in contexts(run))  # type: ignore[index]


@pytest.mark.parametrize(("context", "first_anchor"), [(3, 2), (4, 3), (5, 3), (6, 3), (1, 2), (2, 2)])
def test_other_contexts(context: int, first_anchor: int) -> None:
    """The true first latent serves while (block - 1) * 3 < n; then the anchor does."""
    run, stub = krea(21, context, replace(KREA, window_frames=context + 3))
    assert len(stub.asked) == 7 - first_anchor
    assert set(stub.asked) <= {4 * (context - 1) + 1}
    for one in run.of("denoise"):
        assert one.queries == span(min(one.ctx.block * 3, context), min(one.ctx.block * 3, context) + 2)
        assert one.frames == one.positions == span(0, one.ctx.end - 1)
    for context_latents, block in zip(reversed(contexts(run)), range(6, 0, -1)):
        assert context_latents.shape[2] == context  # type: ignore[union-attr]
        assert torch.equal(context_latents[:, :, 1:], run.out[:, :, 3 * block - context + 1:3 * block])  # type: ignore[index]
        if block < first_anchor:
            assert torch.equal(context_latents[:, :, :1], run.out[:, :, :1])  # type: ignore[index]


def test_a_context_of_six_is_block_causal() -> None:
    run, _ = krea(15, 6, replace(KREA, window_frames=9))
    assert run.told[8:13] == [("prefill", 0, 3), ("prefill", 3, 3), ("denoise", 6, 3), ("denoise", 6, 3), ("prefill", 0, 3)]
    prefills = run.of("prefill")
    assert [one.frames for one in prefills[:2]] == [span(0, 2), span(0, 5)]


def test_a_given_start_serves_as_first_context() -> None:
    """Three latents of a start image: block 0 goes on from them, block 1 still from the true first latent."""
    run, stub = krea(15, prefix=3)
    assert run.told[:3] == [("prefill", 0, 3), ("denoise", 3, 3), ("denoise", 3, 3)]
    found = contexts(run)
    assert run.plan.prefix is not None
    assert torch.equal(found[1][:, :, :1], run.plan.prefix[:, :, :1])  # type: ignore[index]
    assert len(stub.asked) == len(found) - 2 == 2


@pytest.mark.parametrize("switch", [6, 8, 9, 12])
def test_the_context_speaks_the_prompt_of_the_block_before(switch: int) -> None:
    run, _ = krea(18, prompt_at=lambda frame: int(frame >= switch))
    first_new = -(-switch // 3)
    for one in run.seen:
        if one.ctx.phase == "denoise":
            assert one.ctx.prompt_id == int(one.ctx.block >= first_new)
            if one.ctx.block >= 2:
                assert {key.prompt for key in one.keys if key.frame < 3} == {int(one.ctx.block - 1 >= first_new)}


@pytest.mark.parametrize("rebuild", [True, False])
def test_a_rebuild_after_a_restart_renews_the_context_alone(rebuild: bool) -> None:
    run, stub = krea(18, rebuild=rebuild, recache_frames=12, prompt_at=lambda frame: int(frame >= 9))
    index = next(i for i, one in enumerate(run.seen) if one.ctx.block == 3 and one.ctx.phase == "denoise")
    want = [("prefill", 0, 3), ("prefill", 0, 3)] if rebuild else [("prefill", 0, 3), ("recache", 1, 2)]
    assert run.told[index - 2:index] == want
    assert [one.ctx.prompt_id for one in run.seen[index - 2:index]] == [0, 1]
    assert torch.equal(run.inputs[index - 1][:, :, -2:], run.out[:, :, 7:9])
    assert num_model_calls("blockwise", run.plan) == len(run.seen)
    assert len(stub.asked) == 4


def test_causvid_rolls_out_21_frames_from_3() -> None:
    rule = Restart(21, 3, 9, stub := Stub((1, 2, 1, 2, 4)))
    run = sight(CAUSVID, 57, (1.0,), restart=rule)
    firsts = [(one.told, one.ctx.block) for one in run.seen if one.ctx.start == 0]
    assert firsts == [(("denoise", 0, 3), 0), (("clean", 0, 3), 0), (("prefill", 0, 3), 0), (("prefill", 0, 3), 0)]
    assert stub.asked == [9, 9]
    starts = [one.ctx.start for one in run.of("denoise")]
    assert starts == [*range(0, 21, 3), *range(3, 21, 3), *range(3, 21, 3)]
    for one in run.seen:
        assert one.frames == one.positions == span(0, one.ctx.end - 1), "no window, no sink, absolute inside a roll-out"
    found = contexts(run)
    assert torch.equal(found[0][:, :, 1:], run.out[:, :, 19:21])  # type: ignore[index]
    assert torch.equal(found[1][:, :, 1:], run.out[:, :, 37:39])  # type: ignore[index]
    ends = [i for i, one in enumerate(run.seen) if one.told == ("denoise", 18, 3)]
    assert [run.told[i + 1] for i in ends[:2]] == [("prefill", 0, 3)] * 2, "the last block of a roll-out needs no clean pass"


@pytest.mark.parametrize("settings", [PolicySettings(), replace(KREA, positions="slot"), replace(KREA, window_frames=9)])
def test_the_cache_rule_does_not_matter_inside_a_roll_out(settings: PolicySettings) -> None:
    run, _ = krea(18, settings=settings)
    want, _ = krea(18)
    assert [one.frames for one in run.seen] == [one.frames for one in want.seen]
    assert [one.positions for one in run.seen] == [one.positions for one in want.seen]


# -- through a model ------------------------------------------------------------------------------------------------------

DIM, HEADS = 160, 5
WEIGHTS = random_weights(DIM, std=0.08, peak=1.5)
TEXT = seeded_normal(31, (1, 16, 64))
STEPS = schedule(get_preset("krea"))


def anchor_of(out: Tensor, end: int) -> Tensor:
    """A stand-in for the codec: some function of the latents made so far."""
    return 0.7 * out[:, :, end - 3:end - 2].flip(-1)


def krea_oracle(noise: Tensor, context: int = 3, anchor_from: int = 2, clean_time: float = 0.0, last_sigma: float | None = None,
                shift_positions: int = 0) -> Tensor:
    """Krea's sampler in its plainest form: before each block the context is run anew at t = 0, then the block behind it."""
    out, draw = torch.zeros_like(noise), SeededRenoise(3)
    rows, cols = noise.shape[3] // 2, noise.shape[4] // 2
    steps = STEPS.for_block(0)
    sigmas = [s for s, _ in steps[:-1]] + [steps[-1][0] if last_sigma is None else last_sigma]

    def forward(x: Tensor, t: float, start: int, past: dict, keep: bool) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            place = grid_positions(x.shape[2], rows, cols, start)
            k = rope_rotate(k, place)
            keys, values = (torch.cat([*(p[i] for p in past.get(layer, [])), own], 1) for i, own in ((0, k), (1, v)))
            if keep:
                past.setdefault(layer, []).append((k, v))
            return dense_attention(layer, rope_rotate(q, place), keys, values)

        return wan_forward(WEIGHTS, x, torch.full((1, x.shape[2]), t), TEXT, num_heads=HEADS, attend=attend)

    for block in range(noise.shape[2] // 3):
        at = 3 * block
        past: dict = {}
        if block:
            first = out[:, :, :1] if block < anchor_from else anchor_of(out, at)
            latents = torch.cat([first, out[:, :, 1:at][:, :, 1 - context:]], 2)
            for s in range(0, latents.shape[2], 3):
                forward(latents[:, :, s:s + 3], clean_time, s, past, keep=True)
        x = noise[:, :, at:at + 3]
        for i, (_, t) in enumerate(steps):
            x0 = x - sigmas[i] * forward(x, t, min(at, context) + shift_positions, past, keep=False)
            if i + 1 < len(steps):
                x = (1 - sigmas[i + 1]) * x0 + sigmas[i + 1] * draw(block, i, x0)
        out[:, :, at:at + 3] = x0
    return out


def krea_engine(noise: Tensor, context: int = 3) -> Tensor:
    made: list[Tensor] = []

    def anchor(pixel: int) -> Tensor:
        return anchor_of(torch.cat(made, 2), sum(part.shape[2] for part in made))

    engine = PlainEngine(WEIGHTS, [TEXT], HEADS, tuple(noise.shape), 3, PolicySettings("sink_window", context + 3, 0))
    plan = BlockwisePlan(noise, STEPS, 3, SeededRenoise(3), restart=Restart(context + 3, context, 9, anchor))
    for done in run_plan("blockwise", engine, plan):
        made.append(done.latent)
    return torch.cat(made, 2)


@pytest.mark.parametrize(("context", "size"), [(3, (8, 8)), (3, (8, 12)), (6, (8, 8))])
def test_krea_equals_the_oracle(context: int, size: tuple[int, int]) -> None:
    """15 frames of 16 tokens (a context of 3 is no multiple of 128 tokens), of 24, and a context of 6."""
    noise = seeded_normal(7, (1, 16, 15, *size))
    want = krea_oracle(noise, context, 3 if context == 6 else 2)
    assert want.std() > 0.3
    assert (krea_engine(noise, context) - want).abs().max() < RUN_TOLERANCE / 10


@pytest.mark.parametrize("wrong", [{"anchor_from": 9}, {"anchor_from": 1}, {"clean_time": 625.0}, {"shift_positions": 3}, {"context": 6},
                                   {"last_sigma": 0.2}])
def test_a_wrong_rule_is_far_away(wrong: dict[str, float]) -> None:
    noise = seeded_normal(7, (1, 16, 15, 8, 8))
    assert (krea_engine(noise) - krea_oracle(noise, **wrong)).abs().max() > 20 * RUN_TOLERANCE  # type: ignore[arg-type]


def test_krea_ends_at_timestep_0_with_the_last_sigma_of_the_table() -> None:
    steps = STEPS.for_block(0)
    assert [t for _, t in steps] == pytest.approx([1000, 937.5, 833.3333, 625, 0], abs=1e-3)
    assert steps[-1] == (pytest.approx(0.00498, abs=5e-6), 0.0)
    assert [s for s, _ in steps[:-1]] == pytest.approx([1, 0.9375, 0.83333, 0.625], abs=1e-5)
    noise = seeded_normal(7, (1, 16, 6, 8, 8))
    right = krea_engine(noise)
    for other in (SigmaSchedule(STEPS.sigmas[:-1]), replace(STEPS, timesteps=None)):
        engine = PlainEngine(WEIGHTS, [TEXT], HEADS, tuple(noise.shape), 3, KREA)
        plan = BlockwisePlan(noise, other, 3, SeededRenoise(3))
        out = torch.cat([done.latent for done in run_plan("blockwise", engine, plan)], 2)
        assert (out - right).abs().max() > 1e-4
