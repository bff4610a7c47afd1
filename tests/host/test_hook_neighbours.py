"""Other packs beside ours, runs that break, and what is refused: nothing silent, nothing left behind."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from core.engine_tools import HEADS, TEXT, tiny_weights
from fastar_pack.fastar_core.errors import FastARError, UnsupportedError
from fastar_pack.fastar_core.noise import seeded_normal
from fastar_pack.fastar_core.policies.frame_cache import FrameCache
from fastar_pack.fastar_core.runstate import RunState
from host.host_tools import NOISE, build, options_of, prompt, sample, stream, tiny_model, with_forward_wrapper, with_option
from tests_support import Host
from tiny.wan_plain import dense_attention

pytestmark = pytest.mark.cpu
TEXTS = (prompt(2), prompt(7))


@pytest.fixture(scope="module")
def model(host: Host) -> Any:
    return tiny_model()


@pytest.fixture
def noise() -> Tensor:
    return seeded_normal(1, NOISE)


# -- other packs -----------------------------------------------------------------------------------------------------


def test_an_attention_override_before_ours_does_the_dense_work(model: Any, noise: Tensor) -> None:
    keys: list[int] = []

    def theirs(func: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any) -> Tensor:
        keys.append(k.shape[1])
        qh, kh, vh = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
        return dense_attention(0, qh, kh, vh).flatten(2)

    report: dict[str, Any] = {}
    out = stream(with_option(model, optimized_attention_override=theirs), noise, TEXTS[0], report=report)
    calls = report["model_calls"]["denoise"] + report["model_calls"]["clean"]
    assert len(keys) == calls * 2 * 2, "self- and cross-attention of both layers in every call"
    assert [n for n in keys if n != TEXTS[0].shape[1] and n != 512][::2] == [72, 72, 72, 144, 144]
    assert (out - stream(model, noise, TEXTS[0])).abs().max() <= 2e-5

    def doubled(func: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any) -> Tensor:
        return 2 * func(q, k, v, heads, *args, **kwargs)

    assert (stream(with_option(model, optimized_attention_override=doubled), noise, TEXTS[0]) - out).abs().max() > 1e-2


def thief(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    return func(*args, **kwargs)


def test_an_override_set_after_ours_is_noticed(model: Any, noise: Tensor) -> None:
    def steal(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        options_of(args, kwargs)["optimized_attention_override"] = thief
        return executor(x, *args, **kwargs)

    with pytest.raises(UnsupportedError, match=r"overridden by .*thief.*Put the FAST-AR node after the node"):
        stream(with_forward_wrapper(model, steal), noise, TEXTS[0])


def test_losing_our_block_marks_is_noticed(model: Any, noise: Tensor) -> None:
    def strip(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        options_of(args, kwargs)["patches_replace"] = {}
        return executor(x, *args, **kwargs)

    with pytest.raises(FastARError, match=r"never reached FAST-AR's attention"):
        stream(with_forward_wrapper(model, strip), noise, TEXTS[0])


def test_a_call_without_entry_names_is_refused(model: Any, noise: Tensor) -> None:
    def strip(executor: Any, x: Tensor, timestep: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        del options_of(args, kwargs)["uuids"]
        return executor(x, timestep, *args, **kwargs)

    with pytest.raises(UnsupportedError, match="which conditioning entries a call holds"):
        stream(with_forward_wrapper(model, strip), noise, TEXTS[0])


def test_a_block_patch_of_another_pack_still_runs(model: Any, noise: Tensor) -> None:
    ran: list[int] = []

    def patch(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        ran.append(1)
        return extra["original_block"](args)

    patched = model.clone()
    patched.set_model_patch_replace(patch, "dit", "double_block", 1)
    assert torch.equal(stream(patched, noise, TEXTS[0]), stream(model, noise, TEXTS[0]))
    assert len(ran) == 5


def test_a_patch_that_skips_a_block_is_noticed(model: Any, noise: Tensor) -> None:
    patched = model.clone()
    patched.set_model_patch_replace(lambda args, extra: {"img": args["img"]}, "dit", "double_block", 1)
    with pytest.raises(UnsupportedError, match="1 self-attention calls were handled, expected a multiple of 2"):
        stream(patched, noise, TEXTS[0])


# -- leaving no trace ------------------------------------------------------------------------------------------------


def test_the_model_is_as_it_was_after_a_run(model: Any, noise: Tensor) -> None:
    import comfy.samplers

    def stock() -> Tensor:
        return sample(model, comfy.samplers.ksampler("euler"), noise, *TEXTS, cfg=3.0, sigmas=(1.0, 0.6, 0.0))

    network = model.model.diffusion_model
    before, attributes = stock(), [set(vars(m)) for m in network.modules()]
    options = copy.deepcopy(model.model_options)
    stream(model, noise, *TEXTS, cfg=3.0)
    assert torch.equal(stock(), before)
    assert [set(vars(m)) for m in network.modules()] == attributes
    assert model.model_options == options
    assert not model.wrappers or not any(model.wrappers.values())
    assert (stream(model, noise, TEXTS[0]) - before).abs().max() > 1e-2


def test_a_finished_run_holds_nothing(model: Any, noise: Tensor) -> None:
    states: list[RunState] = []
    sizes: list[int] = []
    stream(
        model,
        noise,
        TEXTS[0],
        on_start=lambda state, plan: states.append(state),
        on_step=lambda block, step, steps, x0: sizes.append(states[0].bytes()),
    )
    assert min(sizes) > 0
    assert states[0].bytes() == 0
    assert states[0].attention.dense is None


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(model: Any, noise: Tensor) -> None:
    state = torch.get_rng_state()
    first = stream(model, noise, TEXTS[0], seed=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(stream(model, noise, TEXTS[0], seed=4), first)
    assert not torch.equal(stream(model, noise, TEXTS[0], seed=5), first)


@pytest.fixture
def interrupted() -> Iterator[None]:
    import comfy.model_management

    yield
    comfy.model_management.interrupt_current_processing(False)


@pytest.mark.parametrize("how", ["interrupt", "error"])
def test_a_broken_run_frees_its_cache_and_does_not_harm_the_next(how: str, model: Any, noise: Tensor, interrupted: None) -> None:
    import comfy.model_management as host_memory

    fresh, calls, steps = stream(model, noise, TEXTS[0]), [], []

    def count(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return executor(x, *args, **kwargs)

    def on_step(block: Any, step: int, count: int, x0: Tensor) -> None:
        steps.append(step)
        if len(steps) == 3:
            if how == "error":
                raise RuntimeError("out of paper")
            host_memory.interrupt_current_processing(True)

    expected = RuntimeError if how == "error" else host_memory.InterruptProcessingException
    states: list[RunState] = []
    with pytest.raises(expected):
        stream(
            with_forward_wrapper(model, count),
            noise,
            TEXTS[0],
            on_step=on_step,
            on_start=lambda state, plan: states.append(state),
        )
    assert states[0].bytes() == 0
    assert states[0].attention.dense is None
    assert len(calls) == 4, "three steps and a clean pass, then no further call"
    gc.collect()
    assert [c for c in gc.get_objects() if type(c) is FrameCache and (c._keys or c._values)] == []
    assert torch.equal(stream(model, noise, TEXTS[0]), fresh)


# -- refusals --------------------------------------------------------------------------------------------------------


def refused(model: Any, noise: Tensor, positive: Any, match: str, **options: Any) -> None:
    def forbidden(executor: Any, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("the model was called")

    with pytest.raises(FastARError, match=match):
        stream(with_forward_wrapper(model, forbidden), noise, positive, **options)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"area": (4, 4, 0, 0)}, "an area"),
        ({"mask": torch.ones(1, 8, 12)}, "a mask"),
        ({"start_percent": 0.2, "end_percent": 0.8}, "a timestep range"),
    ],
)
def test_entries_bound_to_place_or_time_are_refused(extra: dict[str, Any], words: str, model: Any, noise: Tensor) -> None:
    refused(model, noise, [[TEXTS[0], extra]], f"positive conditioning has .*{words}.*Use plain prompts")


@pytest.mark.parametrize(("key", "words"), [("hooks", "hooks"), ("gligen", "GLIGEN boxes"), ("control", "a ControlNet")])
def test_other_entries_are_refused_by_name(key: str, words: str, host: Host) -> None:
    from fastar_pack.nodes.host.sampling import check_conds

    with pytest.raises(UnsupportedError, match=f"negative conditioning has {words}"):
        check_conds({"positive": [{}], "negative@12": [{key: object()}]})
    check_conds({"positive": [{key: None, "timestep_start": None}], "negative": []})


def test_other_kinds_of_models_are_refused(noise: Tensor, host: Host) -> None:
    from fastar_pack.nodes.host.hook import check_model

    image_model = build(tiny_weights(channels=16), HEADS, TEXT, model_type="i2v", in_dim=36)
    refused(image_model, noise, TEXTS[0], "of type i2v with 36 input and 16 output channels")
    with pytest.raises(UnsupportedError, match="the model is a Linear; FAST-AR streaming needs a Wan 2.1"):
        check_model(type("Linear", (), {})())


def test_pictures_masks_and_windows_are_refused(model: Any, noise: Tensor) -> None:
    import comfy.samplers

    refused(model, noise[:, :, 0], TEXTS[0], "5-D video latent")
    windows = model.clone()
    windows.model_options["context_handler"] = None
    stream(windows, noise, TEXTS[0])
    from fastar_pack.nodes.host.sampling import _check_request

    guider = comfy.samplers.CFGGuider(model)
    guider.inner_model, guider.conds = model.model, {"positive": []}
    holder = type("Holder", (), {"inner_model": guider})()
    _check_request(holder, {})
    for extra, words in (
        ({"denoise_mask": noise}, "noise mask"),
        ({"model_options": {"context_handler": object()}}, "context windows"),
        ({"model_options": {"multigpu_clones": [1]}}, "multi-GPU"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            _check_request(holder, extra)
