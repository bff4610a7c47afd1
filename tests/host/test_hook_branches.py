"""Conditioning entries: every layout of a guided call is the same run, and entries never share a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from core.engine_tools import window
from fastar_pack.fastar_core.errors import UnsupportedError
from fastar_pack.fastar_core.noise import seeded_normal
from host.host_tools import NOISE, prompt, stream, tiny_model, two_calls, with_forward_wrapper
from tests_support import Host

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def model(host: Host) -> Any:
    return tiny_model()


@pytest.fixture
def noise() -> Tensor:
    return seeded_normal(1, NOISE)


TEXTS = (prompt(2), prompt(7))


def turned_when(patcher: Any, when: Callable[[], bool]) -> Any:
    """A clone whose host hands over [uncond, cond] instead of [cond, uncond] while ``when`` says so."""
    import comfy.samplers

    def function(args: dict[str, Any]) -> list[Tensor]:
        step = -1 if when() else 1
        rest = (args["input"], args["sigma"], args["model_options"])
        return comfy.samplers.calc_cond_batch(args["model"], args["conds"][::step], *rest)[::step]

    clone = patcher.clone()
    clone.model_options["sampler_calc_cond_batch_function"] = function
    return clone


class Layouts:
    """Guided runs in which the host arranges conditional and unconditional differently."""

    def __init__(self, model: Any, noise: Tensor) -> None:
        self.model, self.noise = model, noise
        self.batches: list[int] = []

        def count(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.batches.append(x.shape[0])
            return executor(x, *args, **kwargs)

        self.straight = with_forward_wrapper(model, count)
        self.turned = turned_when(self.straight, lambda: True)
        self.turning = turned_when(self.straight, self.odd)

    def odd(self) -> bool:
        """True before every second call of the driver: each adds two rows, in one call of the model or in two."""
        return sum(self.batches) // 2 % 2 == 1

    def run(self, patcher: Any, want: set[int]) -> Tensor:
        self.batches.clear()
        out = stream(patcher, self.noise, *TEXTS, cfg=3.0, policy=window(4, 1), block=2)
        assert set(self.batches) == want
        return out

    def all(self) -> dict[str, Tensor]:
        results = {"swapped": self.run(self.turned, {2}), "order changes": self.run(self.turning, {2})}
        with two_calls(self.model):
            results["two calls"] = self.run(self.straight, {1})
            results["two calls, order changes"] = self.run(self.turning, {1})
        with two_calls(self.model, self.odd):
            results["batching changes"] = self.run(self.straight, {1, 2})
        return results


def test_every_layout_of_cond_and_uncond_is_equal(model: Any, noise: Tensor) -> None:
    layouts = Layouts(model, noise)
    first = layouts.run(layouts.straight, {2})
    differences = {name: float((out - first).abs().max()) for name, out in layouts.all().items()}
    assert max(differences.values()) <= 2e-5, differences
    unguided = stream(model, noise, TEXTS[0], policy=window(4, 1), block=2)
    assert (unguided - first).abs().max() > 1e-2, "guidance has no effect"


def test_branches_told_by_their_place_would_be_mixed_up(model: Any, noise: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastar_pack.nodes.host.hook import HostModel

    monkeypatch.setattr(HostModel, "_branches_of", lambda self, options: list(range(len(options["uuids"]))))
    layouts = Layouts(model, noise)
    first = layouts.run(layouts.straight, {2})
    assert (layouts.run(layouts.turning, {2}) - first).abs().max() > 1e-2
    with two_calls(model), pytest.raises(UnsupportedError, match="cannot be told apart"):
        layouts.run(layouts.straight, {1})


def test_guided_equals_two_plain_runs_put_together(model: Any, noise: Tensor) -> None:
    """One block of one step: x0 = uncond + 3 (cond - uncond)."""
    from fastar_pack.fastar_core.sigmas import SigmaSchedule

    one = SigmaSchedule((1.0,))
    cond, uncond = (stream(model, noise, text, block=6, schedule=one) for text in TEXTS)
    guided = stream(model, noise, *TEXTS, cfg=3.0, block=6, schedule=one)
    assert (guided - (uncond + 3 * (cond - uncond))).abs().max() <= 5e-5


def test_two_prompts_of_one_role_are_two_branches(model: Any, noise: Tensor) -> None:
    report: dict[str, Any] = {}
    both = [[TEXTS[0], {}], [TEXTS[1], {}]]
    out = stream(model, noise, both, report=report)
    assert report["branches"] == 2
    assert (out - stream(model, noise, list(reversed(both)))).abs().max() <= 2e-5
    assert (out - stream(model, noise, TEXTS[0])).abs().max() > 1e-2


def test_a_second_evaluation_of_an_entry_is_noticed(model: Any, noise: Tensor) -> None:
    """Guidance nodes run an entry again with some layers disturbed; its keys would replace the true ones."""
    import comfy.samplers

    def again(args: dict[str, Any]) -> Tensor:
        comfy.samplers.calc_cond_batch(args["model"], [args["cond"]], args["input"], args["sigma"], args["model_options"])
        return args["denoised"]

    guided = model.clone()
    guided.set_model_sampler_post_cfg_function(again)
    with pytest.raises(UnsupportedError, match=r"evaluated twice in one step.*remove"):
        stream(guided, noise, *TEXTS, cfg=3.0)


def test_entries_that_cannot_be_told_apart_are_noticed(model: Any, noise: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastar_pack.nodes.host import sampling

    monkeypatch.setattr(sampling, "branch_names", lambda conds: {})
    both = [[TEXTS[0], {}], [TEXTS[1], {}]]
    stream(model, noise, both)
    with two_calls(model), pytest.raises(UnsupportedError, match="cannot be told apart"):
        stream(model, noise, both)
