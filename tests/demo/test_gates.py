"""The shipped weights do what their card says, on two held-out seeds; the gates can tell when they would not."""

from __future__ import annotations

import pytest
import torch

from demo import gates, text, world
from demo.data import Bank
from demo.rollout import Sampler


@pytest.fixture(scope="module")
def bank() -> Bank:
    return Bank()


@pytest.mark.cpu
def test_shipped_weights_find_an_old_place_in_the_history_and_only_there(bank: Bank) -> None:
    tours = [gates.itinerary(seed)[: gates.BACK + 1] for seed in (2, 5)]
    ids = [text.batch_ids([tour[n].prompt for tour in tours], bank.words) for n in range(gates.BACK + 1)]
    bare = {gates.BACK: torch.empty(0)}
    latents = gates.shipped_sampler(bank).run(ids, 1, bare=bare)
    judge = gates.Judge(bank)
    for row, tour in enumerate(tours):
        home = tour[gates.BACK].right
        assert judge.landmark(latents[row][:, -1], home)
        assert not judge.landmark(bare[gates.BACK][row][:, -1], home)
        for number, block in enumerate(tour):
            if block.kind in ("new", "slide_new"):
                assert judge.landmark(latents[row][:, 3 * (number + 1)], block.right)


@pytest.mark.cpu
def test_untrained_weights_fail(bank: Bank) -> None:
    shipped = gates.shipped_sampler(bank)
    g = torch.Generator().manual_seed(0)
    dit = {name: torch.randn(value.shape, generator=g) * 0.05 for name, value in shipped.dit.items()}
    block = gates.itinerary(2)[0]
    ids = [text.batch_ids([block.prompt], bank.words)]
    latents = Sampler(dit, shipped.text, bank.slate, torch.float32).run(ids, 1)
    assert not gates.Judge(bank).landmark(latents[0][:, -1], block.right)


@pytest.mark.cpu
def test_itineraries_keep_away_long_enough_and_never_name_looks_twice() -> None:
    for seed in range(64):
        tour = gates.itinerary(seed)
        home = tour[0].name
        assert len(tour) == gates.BLOCKS
        assert [block.name == home for block in tour[: gates.BACK + 1]] == [True, True, *[False] * 10, True]
        assert tour[gates.BACK].kind == "slide_back"
        assert "with" not in tour[gates.BACK].prompt.split()
        named = [block.name for block in tour if "with" in block.prompt.split()]
        assert len(named) == len(set(named))


@pytest.mark.cpu
def test_judge_names_every_clean_scene(bank: Bank) -> None:
    judge = gates.Judge(bank)
    for look in world.all_looks()[::37]:
        assert judge.look(bank.scene(look)) == look


@pytest.mark.cpu
def test_wilson_interval() -> None:
    rate, low, high = gates.wilson(64, 64)
    assert (rate, round(high, 6)) == (1.0, 1.0)
    assert low == pytest.approx(0.9434, abs=1e-3)
    assert gates.wilson(0, 64)[2] == pytest.approx(0.0566, abs=1e-3)
