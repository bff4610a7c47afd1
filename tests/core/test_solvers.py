"""UniPC integrates the flow to second order; the re-noise rule is not an integrator at all."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from fastar_pack.fastar_core.noise import RecordedRenoise
from fastar_pack.fastar_core.solvers import RenoiseSolver, UniPCSolver, teacher_schedule

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
