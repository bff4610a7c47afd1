"""UniPC integrates the flow to second order, and drives the multi-step teachers; the re-noise rule is no integrator at all."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.drivers import BlockwisePlan, num_model_calls, run_plan
from fastar_pack.fastar_core.geometry import RunGeometry
from fastar_pack.fastar_core.noise import RecordedRenoise, SeededRenoise, seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.positions import RopeSpec
from fastar_pack.fastar_core.presets import get_preset, schedule
from fastar_pack.fastar_core.runstate import RunState
from fastar_pack.fastar_core.solvers import RenoiseSolver, UniPCSolver, teacher_schedule
from tiny.wan_plain import grid_positions, rope_rotate, wan_forward
from tiny.weights import random_weights

pytestmark = pytest.mark.cpu
SPREAD = 0.6


def deviation(sigma: float) -> float:
    """Standard deviation of x at sigma when the data are normal with SPREAD; the flow scales every x by it."""
    return math.hypot((1 - sigma) * SPREAD, sigma)


def best_x0(x: Tensor, sigma: float) -> Tensor:
    """What a perfect model answers for such data."""
    return (1 - sigma) * SPREAD**2 / deviation(sigma) ** 2 * x


def euler(x: Tensor, sigmas: tuple[float, ...]) -> Tensor:
    for sigma, following in zip(sigmas, (*sigmas[1:], 0.0)):
        x = x + (following - sigma) * (x - best_x0(x, sigma)) / sigma
    return x


def unipc(x: Tensor, sigmas: tuple[float, ...], correct: bool = True) -> Tensor:
    solver = UniPCSolver(sigmas)
    for i, sigma in enumerate(sigmas):
        x0 = best_x0(x, sigma)
        x = solver.advance(solver.corrected(x, x0, i) if correct else x, x0, i)
    return x


def error(x: Tensor, start: Tensor, sigmas: tuple[float, ...]) -> float:
    exact = start * deviation(0.0) / deviation(sigmas[0])
    return float((x - exact).abs().max())


def errors(method: object, steps: tuple[int, ...], **options: bool) -> list[float]:
    start = torch.linspace(-2, 2, 9, dtype=torch.float64)
    lists = [teacher_schedule(n, 1.0).sigmas for n in steps]
    return [error(method(start, sigmas, **options), start, sigmas) for sigmas in lists]  # type: ignore[operator]


def test_unipc_is_of_second_order() -> None:
    found = errors(unipc, (20, 40, 80, 160))
    assert all(coarse / fine > 3.5 for coarse, fine in pairwise(found)), found
    assert found[-1] < 2e-4


def test_euler_and_the_predictor_alone_are_worse() -> None:
    assert all(coarse / fine < 2.5 for coarse, fine in pairwise(errors(euler, (20, 40, 80, 160))))
    best = errors(unipc, (160,))[0]
    assert errors(euler, (160,))[0] > 50 * best
    assert errors(unipc, (160,), correct=False)[0] > 2 * best


@pytest.mark.parametrize("sigmas", [(1.0, 0.9, 0.5), (0.999, 0.4), (1.0,), (0.3,)])
def test_a_model_that_knows_the_answer_is_believed(sigmas: tuple[float, ...]) -> None:
    """When every x0 is the same, every solver must end at it; a start at sigma 1 has no finite log-SNR."""
    truth, x = torch.full((4,), 0.7), torch.linspace(-1, 1, 4)
    solver = UniPCSolver(sigmas)
    for i in range(len(sigmas)):
        x = solver.advance(solver.corrected(x, truth, i), truth, i)
    assert torch.allclose(x, truth, atol=1e-5)


def test_renoise_follows_its_formula() -> None:
    solver = RenoiseSolver((1.0, 0.25), RecordedRenoise([torch.full((2,), 8.0)]), 0)
    x0 = torch.full((2,), 4.0)
    assert torch.equal(solver.advance(x0 * 9, x0, 0), torch.full((2,), 0.75 * 4 + 0.25 * 8))
    assert torch.equal(solver.advance(x0 * 9, x0, 1), x0)
    assert torch.equal(solver.corrected(x0, x0 * 2, 1), x0)


def test_teacher_schedule_tells_the_model_whole_timesteps() -> None:
    schedule = teacher_schedule(50, 5.0)
    assert len(schedule.sigmas) == 50
    assert all(t == int(t) for _, t in schedule.for_block(0))
    assert schedule.sigmas[0] == pytest.approx(0.9998, abs=1e-4)


# -- order of single steps ------------------------------------------------------------------------------------------------


def log_snr(sigma: float) -> float:
    return math.log((1 - sigma) / sigma)


def first_order(x: Tensor, x0: Tensor, sigma: float, following: float) -> Tensor:
    """The exact solution for an x0 that stays as it is."""
    return following / sigma * x + (1 - following / sigma * (1 - sigma) / (1 - following)) * (1 - following) * x0


def second_order(x: Tensor, x0: Tensor, before: Tensor, sigmas: tuple[float, float, float]) -> Tensor:
    """The two-step rule of second order: half of the slope between the last two outputs is added (bh2)."""
    last, now, following = sigmas
    h = log_snr(following) - log_snr(now)
    slope = (x0 - before) * h / (log_snr(now) - log_snr(last))
    return first_order(x, x0, now, following) + (1 - following) * (1 - math.exp(-h)) * slope / 2


def test_the_first_step_is_of_first_order_and_the_following_of_second() -> None:
    """Seen in single steps: which of the two rules the predictor used."""
    sigmas = (0.9, 0.7, 0.45, 0.2)
    generator = torch.Generator().manual_seed(3)
    x, *outputs = torch.randn(5, 6, generator=generator, dtype=torch.float64)
    solver = UniPCSolver(sigmas)
    after = solver.advance(x, outputs[0], 0)
    assert torch.allclose(after, first_order(x, outputs[0], 0.9, 0.7), atol=1e-12)
    corrected = solver.corrected(after, outputs[1], 1)
    assert not torch.allclose(corrected, after, atol=1e-3), "the new output corrects the step that led to it"
    later = solver.advance(corrected, outputs[1], 1)
    assert torch.allclose(later, second_order(corrected, outputs[1], outputs[0], (0.9, 0.7, 0.45)), atol=1e-12)
    assert not torch.allclose(later, first_order(corrected, outputs[1], 0.7, 0.45), atol=1e-3)


def test_the_last_step_is_of_first_order() -> None:
    """It ends at sigma 0, where a rule of first order gives the model's last output itself; two outputs would overshoot."""
    outputs = [torch.full((2,), value) for value in (1.0, 2.0, 5.0)]
    solver, x = UniPCSolver((0.9, 0.6, 0.3)), torch.zeros(2)
    for i, x0 in enumerate(outputs):
        x = solver.advance(solver.corrected(x, x0, i), x0, i)
    assert torch.equal(x, outputs[-1])


def test_the_last_step_is_not_second_order_when_it_ends_above_zero() -> None:
    """A list without an implied 0 shows the order that the final 0 hides."""
    solver = UniPCSolver((0.9, 0.6, 0.3))
    solver.sigmas[-1] = 0.1
    x = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    outputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for i in range(2):
        x = solver.advance(solver.corrected(x, outputs[i], i), outputs[i], i)
    corrected = solver.corrected(x, outputs[2], 2)
    last = solver.advance(corrected, outputs[2], 2)
    assert torch.allclose(last, first_order(corrected, outputs[2], 0.3, 0.1), atol=1e-12)
    assert not torch.allclose(last, second_order(corrected, outputs[2], outputs[1], (0.6, 0.3, 0.1)), atol=1e-3)


# -- the teachers: cfg 3 with two caches ------------------------------------------------------------------------------------

WEIGHTS = random_weights(std=0.08, peak=1.5)
TEXTS = {"positive": seeded_normal(1, (1, 8, 64)), "negative": seeded_normal(2, (1, 8, 64))}
SHAPE = (1, 16, 6, 4, 4)


class Guided:
    """A model call with cfg over two branches, each with a cache of its own; ``shared`` and ``lazy`` are wrong variants."""

    def __init__(self, cfg: float = 3.0, shared: bool = False, lazy: bool = False) -> None:
        self.cfg, self.shared, self.lazy = cfg, shared, lazy
        self.run = RunState(PolicySettings(), RunGeometry(SHAPE[2], 3, 2, 2, 2), RopeSpec(32))
        self.calls: list[FwdCtx] = []

    def velocity(self, x: Tensor, ctx: FwdCtx, branch: str) -> Tensor:
        policy = self.run.policy("positive" if self.shared else branch)
        t = torch.tensor(ctx.timesteps)[None]
        return wan_forward(WEIGHTS, x, t, TEXTS[branch], num_heads=4, attend=lambda layer, *qkv: policy.attend(layer, *qkv, ctx))

    def __call__(self, x: Tensor, ctx: FwdCtx) -> Tensor:
        self.calls.append(ctx)
        self.run.begin(ctx)
        positive = self.velocity(x, ctx, "positive")
        negative = self.velocity(x if ctx.phase == "denoise" or not self.lazy else torch.zeros_like(x), ctx, "negative")
        self.run.end()
        return x - ctx.sigmas[0] * (negative + self.cfg * (positive - negative))


def teacher_run(call: Guided, steps: int = 50, key: str = "self_forcing_teacher") -> Tensor:
    row = get_preset(key)
    row = type(row)(**{**row.__dict__, "num_steps": steps})
    plan = BlockwisePlan(seeded_normal(3, SHAPE), schedule(row), row.block, SeededRenoise(0), solver=row.solver)  # type: ignore[arg-type]
    out = torch.cat([done.latent for done in run_plan("blockwise", call, plan)], 2)
    assert num_model_calls("blockwise", plan) == len(call.calls)
    return out


def teacher_oracle(steps: int, cfg: float = 3.0) -> Tensor:
    """Block by block without any cache: the clean past at t = 0 in front, for each prompt its own, then the solver."""
    noise, clean = seeded_normal(3, SHAPE), torch.zeros(1, 16, 0, 4, 4)
    told = schedule(get_preset("self_forcing_teacher")) if steps == 50 else teacher_schedule(steps, 5.0)
    for start in (0, 3):
        x, solver = noise[:, :, start : start + 3], UniPCSolver(told.sigmas)
        for i, (sigma, t) in enumerate(told.for_block(0)):
            v = {branch: _uncached(torch.cat([clean, x], 2), start, t, text) for branch, text in TEXTS.items()}
            x0 = x - sigma * (v["negative"] + cfg * (v["positive"] - v["negative"]))
            x = solver.advance(solver.corrected(x, x0, i), x0, i)
        clean = torch.cat([clean, x], 2)
    return clean


def _uncached(x: Tensor, start: int, t: float, text: Tensor) -> Tensor:
    places, unit = grid_positions(x.shape[2], 2, 2), torch.arange(x.shape[2]).repeat_interleave(4) // 3
    mask = torch.where(unit[:, None] >= unit[None], 0.0, -torch.inf)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (y.transpose(1, 2) for y in (rope_rotate(q, places), rope_rotate(k, places), v))
        return ((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask).softmax(-1) @ v).transpose(1, 2)

    times = torch.tensor([[0.0] * start + [t] * (x.shape[2] - start)])
    return wan_forward(WEIGHTS, x, times, text, num_heads=4, attend=attend)[:, :, start:]


@pytest.mark.parametrize("key", ["self_forcing_teacher", "causal_forcing_teacher"])
def test_a_teacher_makes_50_guided_steps_and_a_clean_pass_per_block(key: str) -> None:
    call = Guided()
    out = teacher_run(call, key=key)
    assert [ctx.phase for ctx in call.calls] == ["denoise"] * 50 + ["clean"] + ["denoise"] * 50
    assert call.run.report()["branches"] == 2
    told = [ctx.timesteps[0] for ctx in call.calls[:50]]
    assert told == sorted(told, reverse=True)
    assert all(t == int(t) for t in told)
    assert (out - teacher_oracle(50)).abs().max() < 1e-4


@pytest.mark.parametrize("wrong", [{"shared": True}, {"lazy": True}, {"cfg": 1.0}])
def test_both_prompts_need_their_own_cache_with_clean_passes(wrong: dict[str, object]) -> None:
    want = teacher_oracle(6)
    assert (teacher_run(Guided(), 6) - want).abs().max() < 1e-4
    assert (teacher_run(Guided(**wrong), 6) - want).abs().max() > 1e-2  # type: ignore[arg-type]
