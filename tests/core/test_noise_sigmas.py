"""Every draw comes from its own seeded generator; every sigma equals the reference table to the last bit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from core.engine_tools import FULL, Rollout
from fastar_pack.fastar_core.errors import ConfigError, GeometryError
from fastar_pack.fastar_core.noise import RecordedRenoise, SeededRenoise, seeded_normal
from fastar_pack.fastar_core.sigmas import SigmaSchedule, nearest_in_table, training_table, warp
from tiny.golden import load_golden

pytestmark = pytest.mark.cpu


def draw(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed))


def test_the_stock_samplers_draws_bit_for_bit() -> None:
    golden = load_golden("A6")
    seed = golden.meta["seed"]
    assert torch.equal(seeded_normal(seed, golden.meta["latent_shape"]), golden.tensors["noise"])
    renoise, steps, block = SeededRenoise(seed), golden.meta["steps"], golden.meta["block"]
    like = torch.empty(1, 16, block, *golden.meta["latent_shape"][3:])
    order = [(b, i) for b in range(golden.meta["latent_shape"][2] // block) for i in range(steps - 1)]
    assert len(order) == golden.meta["num_draws"]
    for number, (b, i) in enumerate(order):
        assert torch.equal(renoise(b, i, like), golden.tensors[f"renoise.{number:03d}"])
    assert not torch.equal(renoise(1, 0, like), golden.tensors["renoise.000"])


@pytest.mark.parametrize(("seed", "block", "step"), [(0, 0, 0), (5, 3, 2), (2**32, 1, 1), (2**64 - 2, 2, 1)])
def test_seed_rule_also_for_the_largest_seeds(seed: int, block: int, step: int) -> None:
    got = SeededRenoise(seed)(block, step, torch.empty(2, 3))
    assert torch.equal(got, draw((seed + 1000 * block + step) % 2**64, (2, 3)))


def test_draws_take_the_form_of_what_they_are_added_to() -> None:
    like = torch.empty(2, 4, dtype=torch.bfloat16)
    got = SeededRenoise(3)(0, 0, like)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, draw(3, (2, 4)).bfloat16())


def test_recorded_draws_are_used_once_and_checked() -> None:
    renoise = RecordedRenoise([torch.zeros(2), torch.ones(3)])
    assert torch.equal(renoise(9, 9, torch.empty(2)), torch.zeros(2))
    with pytest.raises(GeometryError, match=r"draw number 1 of shape \(2,\)"):
        renoise(0, 1, torch.empty(2))
    renoise(0, 1, torch.empty(3))
    with pytest.raises(GeometryError, match="2 were recorded"):
        renoise(0, 2, torch.empty(3))


def test_a_run_leaves_the_global_generator_alone_and_ignores_it() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = Rollout((1, 4, 6, 8, 12), 3, FULL, prefix=1).run()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert not torch.equal(torch.get_rng_state(), before)
    assert torch.equal(Rollout((1, 4, 6, 8, 12), 3, FULL, prefix=1).run(), first)
    assert not torch.equal(Rollout((1, 4, 6, 8, 12), 3, FULL, prefix=1, seed=6).run(), first)


def test_noise_under_the_prefix_is_ignored_but_counted() -> None:
    """Frames behind a prefix of p start from frames p, p + 1, ... of the noise, whatever the first p hold."""
    plain, poisoned, moved = (Rollout((1, 4, 7, 8, 12), 3, FULL, prefix=3) for _ in range(3))
    out = plain.run()
    poisoned.plan.noise[:, :, :3] = float("nan")
    assert torch.equal(poisoned.run(), out)
    assert torch.equal(out[:, :, :3], plain.plan.prefix)
    assert torch.equal(plain.calls[1][0], plain.plan.noise[:, :, 3:6])
    moved.plan.noise.copy_(moved.plan.noise.roll(-3, 2))
    assert (moved.run() - out).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["A1", "A2", "A3", "A4", "A5"])
def test_warp_equals_the_reference_tables_bit_for_bit(name: str) -> None:
    golden = load_golden(name)
    lists = [("raw_steps", ""), ("raw_steps_first_block", "_first")]
    for raw, suffix in [(golden.meta[key], suffix) for key, suffix in lists if golden.meta.get(key)]:
        sigmas = warp(tuple(raw), golden.meta["shift"])
        assert torch.equal(torch.tensor(sigmas), golden.tensors["sigmas" + suffix])
        schedule = SigmaSchedule(sigmas)
        told = torch.tensor([t for _, t in schedule.for_block(0)])
        assert torch.equal(told, golden.tensors["timesteps" + suffix])


def test_a_table_in_float64_would_miss_the_last_bit() -> None:
    golden = load_golden("A4")
    exact = [5 * u / (1 + 4 * u) for u in (1.0, 0.8, 0.6, 0.4, 0.2)]
    assert not torch.equal(torch.tensor(exact), golden.tensors["sigmas"])
    assert torch.allclose(torch.tensor(exact), golden.tensors["sigmas"], atol=1e-6)


@pytest.mark.parametrize(
    ("raw", "shift", "timesteps"),
    [
        ((1000, 750, 500, 250), 8.0, (1000, 960, 888.889, 727.273)),
        ((1000, 666, 333), 5.0, (1000, 908.843, 713.979)),
        ((1000, 500), 8.0, (1000, 888.889)),
        ((1000, 750, 500, 250), 1.0, (1000, 750, 500, 250)),
    ],
)
def test_published_warped_lists(raw: tuple[int, ...], shift: float, timesteps: tuple[float, ...]) -> None:
    assert [round(1000 * s, 3) for s in warp(raw, shift)] == pytest.approx(timesteps, abs=2e-3)


def test_unwarped_lists_take_the_nearest_entry() -> None:
    assert nearest_in_table(1000.0, 5.0) == 1.0
    assert nearest_in_table(750.0, 5.0) == pytest.approx(0.75, abs=2e-3)
    assert nearest_in_table(757.0, 8.0) == pytest.approx(0.7568, abs=1e-4)
    assert nearest_in_table(0.0, 5.0) == pytest.approx(0.00498, abs=1e-5)
    assert len(training_table(5.0)) == 1001


@pytest.mark.parametrize("raw", [(1001,), (0,), (1000, -5)])
def test_raw_steps_outside_the_table_are_refused(raw: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"raw step {raw[-1]} is outside 1\.\.1000"):
        warp(raw, 5.0)


@pytest.mark.parametrize("sigmas", [(), (1.0, 0.0), (0.5, 0.5), (0.5, 0.6), (1.1, 0.5), (0.5, -0.1)])
def test_impossible_schedules_are_refused(sigmas: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="expected at least one value, falling, inside"):
        SigmaSchedule(sigmas)
    with pytest.raises(ConfigError, match="first_block"):
        SigmaSchedule((1.0,), first_block=sigmas)


def test_the_first_block_may_have_its_own_list() -> None:
    schedule = SigmaSchedule((1.0, 0.5), first_block=(1.0, 0.75, 0.5))
    assert [len(schedule.for_block(i)) for i in range(3)] == [3, 2, 2]
    assert schedule.max_steps == 3
    assert schedule.for_block(0)[1] == (0.75, 750.0)
    assert replace(schedule, first_block=None).for_block(0) == [(1.0, 1000.0), (0.5, 500.0)]
    assert all(a > b for a, b in pairwise(s for s, _ in schedule.for_block(0)))


def test_given_timesteps_go_to_the_model_as_they_are() -> None:
    schedule = SigmaSchedule((1.0, 0.5), timesteps=(999.0, 499.0))
    assert schedule.for_block(3) == [(1.0, 999.0), (0.5, 499.0)]
