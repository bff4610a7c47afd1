"""The loops make the right calls in the right order, and hand over what they promise."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core.engine_tools import FULL, Rollout
from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.drivers import BlockwisePlan, Restart, num_model_calls, run_plan
from fastar_pack.fastar_core.errors import ConfigError, GeometryError
from fastar_pack.fastar_core.noise import SeededRenoise, seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.sigmas import SigmaSchedule

pytestmark = pytest.mark.cpu
TWO = SigmaSchedule((1.0, 0.5), first_block=(1.0, 0.75, 0.5))
LEVELS = SigmaSchedule((1.0, 0.75, 0.5))


class Recorder:
    """A model whose x0 is half of its input; notes every call."""

    def __init__(self) -> None:
        self.calls: list[FwdCtx] = []
        self.inputs: list[Tensor] = []

    def __call__(self, x: Tensor, ctx: FwdCtx) -> Tensor:
        assert x.shape[2] == ctx.num_frames
        self.calls.append(ctx)
        self.inputs.append(x)
        return x / 2

    def told(self) -> list[tuple[str, int, int, tuple[float, ...]]]:
        return [(c.phase, c.start, c.num_frames, c.timesteps) for c in self.calls]


def plan(frames: int, block: int, **changes: object) -> BlockwisePlan:
    base = BlockwisePlan(seeded_normal(0, (1, 2, frames, 4, 6)), TWO, block, SeededRenoise(0))
    return replace(base, **changes)


def run(one: BlockwisePlan, kind: str = "blockwise") -> tuple[Recorder, Tensor]:
    recorder = Recorder()
    blocks = list(run_plan(kind, recorder, one))  # type: ignore[arg-type]
    assert [b.block for b in blocks] == one.blocks
    assert all(b.latent.shape[2] == b.block.num_frames for b in blocks)
    return recorder, torch.cat([b.latent for b in blocks], 2)


def test_calls_of_a_run_with_prefix_and_short_last_block() -> None:
    recorder, _ = run(plan(8, 3, prefix=torch.zeros(1, 2, 4, 4, 6)))
    assert recorder.told() == [
        ("prefill", 0, 3, (0.0,) * 3),
        ("prefill", 3, 1, (0.0,)),
        ("denoise", 4, 3, (1000.0,) * 3),
        ("denoise", 4, 3, (750.0,) * 3),
        ("denoise", 4, 3, (500.0,) * 3),
        ("clean", 4, 3, (0.0,) * 3),
        ("denoise", 7, 1, (1000.0,)),
        ("denoise", 7, 1, (500.0,)),
    ]
    assert [c.step for c in recorder.calls if c.phase == "denoise"] == [0, 1, 2, 0, 1]
    assert [c.block for c in recorder.calls if c.phase == "denoise"] == [0, 0, 0, 1, 1]


def test_inputs_follow_the_renoise_rule() -> None:
    one = plan(6, 3)
    recorder, out = run(one)
    draw = SeededRenoise(0)
    x = one.noise[:, :, 3:]
    assert torch.equal(recorder.inputs[4], x)
    assert torch.equal(recorder.inputs[5], 0.5 * (x / 2) + 0.5 * draw(1, 0, x))
    assert torch.equal(out[:, :, 3:], recorder.inputs[5] / 2)
    assert torch.equal(recorder.inputs[3], out[:, :, :3]), "the clean pass is fed the finished block"
    assert not torch.equal(recorder.inputs[5], 0.5 * (x / 2) + 0.5 * draw(0, 0, x))


@pytest.mark.parametrize("kind", ["blockwise", "rolling"])
def test_the_number_of_calls_is_known_beforehand(kind: str) -> None:
    for frames in (1, 2, 3, 4, 9, 10, 31):
        for block in (1, 3, 4):
            for prefix in {0, 1, 3, 7}:
                for clean_last in (False, True):
                    if prefix >= frames:
                        continue
                    one = plan(
                        frames,
                        block,
                        clean_last=clean_last,
                        schedule=LEVELS if kind == "rolling" else TWO,
                        prefix=torch.zeros(1, 2, prefix, 4, 6) if prefix else None,
                    )
                    recorder, out = run(one, kind)
                    assert len(recorder.calls) == num_model_calls(kind, one)  # type: ignore[arg-type]
                    assert out.shape[2] == frames - prefix
                    assert len(recorder.calls) == num_model_calls(kind, replace(one, clean_last=not clean_last)) - (
                        -1 if clean_last else 1
                    ) * extra_clean_passes(kind, one)


def extra_clean_passes(kind: str, one: BlockwisePlan) -> int:
    """Passes that only clean_last asks for: the last block's, and in a rolling run those of ramp-up and ramp-down's end."""
    return 1 if kind == "blockwise" else len(one.schedule.sigmas)


def test_blocks_are_handed_over_before_their_clean_pass() -> None:
    recorder = Recorder()
    running = run_plan("blockwise", recorder, plan(6, 3))
    next(running)
    assert [c.phase for c in recorder.calls] == ["denoise"] * 3
    next(running)
    assert [c.phase for c in recorder.calls] == ["denoise"] * 3 + ["clean"] + ["denoise"] * 2


def test_steps_are_reported_with_the_blocks_own_count() -> None:
    seen: list[tuple[int, int, int]] = []
    run(plan(6, 3, on_step=lambda block, step, steps, x0: seen.append((block.index, step, steps))))
    assert seen == [(0, 0, 3), (0, 1, 3), (0, 2, 3), (1, 0, 2), (1, 1, 2)]


def test_prompts_switch_at_block_borders() -> None:
    recorder, _ = run(plan(9, 3, prompt_at=lambda frame: "new" if frame >= 4 else "old"))
    assert {(c.start, c.prompt_id) for c in recorder.calls} == {(0, "old"), (3, "old"), (6, "new")}


def test_recache_precedes_the_block_in_the_new_prompt() -> None:
    recorder, out = run(plan(15, 3, prompt_at=lambda frame: int(frame >= 9), recache_frames=6))
    at = next(i for i, c in enumerate(recorder.calls) if c.phase == "recache")
    assert recorder.told()[at] == ("recache", 3, 6, (0.0,) * 6)
    assert recorder.calls[at].prompt_id == 1
    assert (recorder.calls[at - 1].phase, recorder.calls[at - 1].start) == ("clean", 6)
    assert (recorder.calls[at + 1].phase, recorder.calls[at + 1].start) == ("denoise", 9)
    assert torch.equal(recorder.inputs[at], out[:, :, 3:9])
    assert sum(c.phase == "recache" for c in recorder.calls) == 1
    none, _ = run(plan(15, 3, prompt_at=lambda frame: int(frame >= 9)))
    assert not any(c.phase == "recache" for c in none.calls)


def test_rolling_levels_ramp_up_and_down() -> None:
    recorder, _ = run(plan(9, 3, schedule=LEVELS, clean_last=True), "rolling")
    windows = [(c.start, c.timesteps[::3]) for c in recorder.calls if c.phase == "denoise"]
    assert windows == [(0, (1000.0,)), (0, (750.0, 1000.0)), (0, (500.0, 750.0, 1000.0)), (3, (500.0, 750.0)), (6, (500.0,))]
    assert not all(c.uniform for c in recorder.calls)


def test_rolling_with_one_level_is_blockwise_with_one_step() -> None:
    one = SigmaSchedule((1.0,))
    block, roll = Rollout((1, 4, 9, 8, 12), 3, FULL, schedule=one), Rollout((1, 4, 9, 8, 12), 3, PolicySettings("rolling", None, 3))
    roll.plan = replace(block.plan, schedule=one)
    rolled = torch.cat([d.latent for d in run_plan("rolling", roll.call, roll.plan)], 2)
    assert (rolled - block.run()).abs().max() <= 1e-5
    short = Rollout((1, 4, 9, 8, 12), 3, PolicySettings("rolling", 6, 1))
    short.plan = roll.plan
    assert (torch.cat([d.latent for d in run_plan("rolling", short.call, short.plan)], 2) - rolled).abs().max() > 1e-2


def test_a_timeline_starts_over_from_its_context() -> None:
    asked: list[int] = []

    def anchor(pixel: int) -> Tensor:
        asked.append(pixel)
        return torch.full((1, 2, 1, 4, 6), 9.0)

    recorder, out = run(plan(12, 3, schedule=LEVELS, restart=Restart(6, 3, 7, anchor)))
    starts = [(c.phase, c.start) for c in recorder.calls if c.step == 0]
    assert starts == [("denoise", 0), ("clean", 0), ("denoise", 3), ("prefill", 0), ("denoise", 3), ("prefill", 0), ("denoise", 3)]
    assert asked == [7, 7]
    fed = [x for x, c in zip(recorder.inputs, recorder.calls) if c.phase == "prefill"]
    assert torch.equal(fed[1], torch.cat([torch.full((1, 2, 1, 4, 6), 9.0), out[:, :, 7:9]], 2))
    kept, out = run(plan(12, 3, schedule=LEVELS, restart=Restart(6, 3, 7, anchor, keep_first=True)))
    fed = [x for x, c in zip(kept.inputs, kept.calls) if c.phase == "prefill"]
    assert torch.equal(fed[1][:, :, :1], out[:, :, :1])
    one = plan(12, 3, schedule=LEVELS, restart=Restart(6, 3, 7, anchor))
    assert num_model_calls("blockwise", one) == len(recorder.calls)


def test_a_restart_through_the_engine_forgets_everything_else() -> None:
    """Blocks after a restart depend on the context alone: another past with the same context gives the same block."""

    def last_block(scale: float) -> Tensor:
        rollout = Rollout((1, 4, 9, 8, 12), 3, FULL)
        rollout.plan = replace(rollout.plan, restart=Restart(6, 1, 4, lambda pixel: torch.ones(1, 4, 1, 8, 12)))
        rollout.plan.noise[:, :, :6] *= scale
        return rollout.run()[:, :, 6:]

    assert torch.equal(last_block(1.0), last_block(0.5))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"noise": torch.zeros(2, 4, 6, 8)}, GeometryError, "5 dimensions"),
        ({"prefix": torch.zeros(1, 2, 3, 4, 5)}, GeometryError, "does not fit the video"),
        ({"prefix": torch.zeros(2, 2, 3, 4, 6)}, GeometryError, "same batch"),
        ({"restart": Restart(6, 5, 4)}, ConfigError, "does not fit behind 5 context"),
    ],
)
def test_impossible_plans_are_refused(change: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        plan(9, 3, **change)


def test_a_context_that_is_no_context_is_refused() -> None:
    for frames, context in ((6, 6), (6, 0)):
        with pytest.raises(ConfigError, match="context must be at least 1 and smaller"):
            Restart(frames, context, 4)


def test_a_restart_that_needs_the_vae_says_so() -> None:
    with pytest.raises(ConfigError, match="needs the VAE"):
        run(plan(12, 3, schedule=LEVELS, restart=Restart(6, 3, 4)))


@pytest.mark.parametrize(
    ("phase", "start", "count", "values", "words"),
    [
        ("warmup", 0, 1, (1.0,), "phase 'warmup' is not one of"),
        ("denoise", -1, 1, (1.0,), "start -1"),
        ("denoise", 0, 0, (), "at least one latent frame"),
        ("denoise", 0, 2, (1.0,), "2 latent frames need as many sigmas"),
    ],
)
def test_impossible_calls_are_refused(phase: str, start: int, count: int, values: tuple[float, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FwdCtx(phase, start, count, values, values, 2, 3)  # type: ignore[arg-type]
