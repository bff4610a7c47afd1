"""The hook: what reaches the cache, in which form, and what happens when another node is in the way."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from core.engine_tools import HEADS, TEXT, tiny_weights, window
from fastar_pack.fastar_core.attention import Attention
from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.errors import FastARError, UnsupportedError
from fastar_pack.fastar_core.noise import seeded_normal
from fastar_pack.fastar_core.policies.frame_cache import FrameCache
from host.host_tools import (
    build,
    driven,
    options_of,
    plain_call,
    prompt,
    sample,
    stream,
    tiny_model,
    two_calls,
    with_forward_wrapper,
    with_option,
)
from tests_support import Host
from tiny.wan_plain import dense_attention, grid_positions, rope_rotate, wan_forward

pytestmark = pytest.mark.cpu
NOISE = (1, 16, 6, 8, 12)
LATE = (255, 1023, 2047)


@pytest.fixture(scope="module")
def model(host: Host) -> Any:
    return tiny_model()


@pytest.fixture
def noise() -> Tensor:
    return seeded_normal(1, NOISE)


class Seen:
    """What the policy was given (q, k before rotation) and what attention was given (after), call by call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.raw: list[tuple[int, Tensor, Tensor]] = []
        self.rotated: list[tuple[Tensor, Tensor]] = []
        policy, attention = FrameCache.attend, Attention.attend

        def attend(cache: FrameCache, layer: int, q: Tensor, k: Tensor, v: Tensor, ctx: FwdCtx) -> Tensor:
            self.raw.append((layer, q.clone(), k.clone()))
            return policy(cache, layer, q, k, v, ctx)

        def attention_attend(one: Attention, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
            self.rotated.append((q.clone(), k.clone()))
            return attention(one, q, k, v, bias)

        monkeypatch.setattr(FrameCache, "attend", attend)
        monkeypatch.setattr(Attention, "attend", attention_attend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_are_those_of_the_norms_bit_for_bit(dtype: torch.dtype, host: Host, noise: Tensor,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    patcher = tiny_model(dtype)
    normed: dict[str, list[Tensor]] = {"norm_q": [], "norm_k": []}
    handles = [getattr(block.self_attn, name).register_forward_hook(lambda m, i, out, name=name: normed[name].append(out.clone()))
               for block in patcher.model.diffusion_model.blocks for name in normed]
    seen = Seen(monkeypatch)
    user = {"scale_t": 0.5, "shift_t": 5.0, "scale_y": 2.0, "shift_x": 3.0}
    stream(with_option(patcher, rope_options=user), noise, prompt(2))
    for handle in handles:
        handle.remove()
    assert len(seen.raw) == len(normed["norm_q"]) == 2 * 5
    for (_, q, k), normed_q, normed_k in zip(seen.raw, normed["norm_q"], normed["norm_k"]):
        assert q.dtype == dtype
        assert torch.equal(q.flatten(2), normed_q)
        assert torch.equal(k.flatten(2), normed_k)
    q = seen.raw[2][1]
    assert not torch.equal(q, rope_rotate(q, grid_positions(3, 4, 6))), "a rotation by the host would be seen"


def host_rotation(patcher: Any, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of the first self-attention as the host rotates them, without anything of ours."""
    seen: list[tuple[Tensor, Tensor]] = []

    def spy(func: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any) -> Tensor:
        seen.append((q.unflatten(-1, (heads, -1)), k.unflatten(-1, (heads, -1))))
        return func(q, k, v, heads, *args, **kwargs)

    sample(with_option(patcher, optimized_attention_override=spy), plain_call(1.0), noise, prompt(2))
    return seen[0]


@pytest.mark.parametrize("user", [{}, {"shift_t": 5.0}, {"scale_t": 0.5}, {"scale_y": 0.5, "scale_x": 2.0, "shift_y": 1.0},
                                  {"scale_t": 0.5, "shift_t": 5.0}])
def test_the_users_rope_options_are_applied_as_the_host_would(user: dict[str, float], model: Any, noise: Tensor,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    patcher = with_option(model, rope_options=user) if user else model
    q, k = host_rotation(patcher, noise)
    plain_q, plain_k = host_rotation(model, noise)
    seen = Seen(monkeypatch)
    stream(patcher, noise, prompt(2), block=6)
    got_q, got_k = seen.rotated[0]
    assert (got_q - q).abs().max() <= 1e-5
    assert (got_k - k).abs().max() <= 1e-5
    assert bool(user) == bool((plain_q - q).abs().max() > 1e-2)


def late_driver(call: Any, x: Tensor) -> Tensor:
    """Equal frames up to far beyond 256; one denoise call of 4 frames at each of LATE. One token per frame."""
    frame = x[:, :, :1]

    def ctx(phase: Any, start: int, count: int, sigma: float) -> FwdCtx:
        return FwdCtx(phase, start, count, (sigma,) * count, (1000 * sigma,) * count, 1, 1)

    end = 0
    for start in LATE:
        call(frame.expand(-1, -1, start - end, -1, -1), ctx("prefill", end, start - end, 0.0))
        block = frame.expand(-1, -1, 4, -1, -1)
        call(block, ctx("denoise", start, 4, 0.5))
        call(block, ctx("clean", start, 4, 0.0))
        end = start + 4
    return x


def test_a_bfloat16_model_far_out_keeps_positions_apart(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    patcher = tiny_model(torch.bfloat16)
    seen = Seen(monkeypatch)
    sample(patcher, driven(late_driver, LATE[-1] + 4), seeded_normal(3, (1, 16, 1, 2, 2)), prompt(2))
    for i, start in enumerate(LATE):
        number = 6 * i + 2  # prefill, denoise, clean with two layers each
        _, q, k = seen.raw[number]
        got_q, got_k = seen.rotated[number]
        assert got_q.dtype == torch.bfloat16
        assert got_k.shape[1] == start + 4
        positions = grid_positions(4, 1, 1, start)
        for raw, got in ((q, got_q), (k, got_k[:, start:])):
            assert torch.equal(raw, raw[:, :1].expand_as(raw)), "the frames differ before rotation"
            assert torch.equal(got, rope_rotate(raw.float(), positions).bfloat16())
            assert all(not torch.equal(got[:, a], got[:, b]) for a in range(4) for b in range(a))
        own = patcher.model.diffusion_model.rope_encode(4, 2, 2, t_start=start, dtype=torch.bfloat16)
        own = own.movedim(2, 1)[0].flatten(1) if own.shape[1] != 4 else own[0].flatten(1)
        assert any(torch.equal(own[a], own[b]) for a in range(4) for b in range(a)), "the host's own positions collide here"


# -- per-frame timesteps ---------------------------------------------------------------------------------------------

LEVELS = (0.9, 0.7, 0.4)


def level_driver(call: Any, x: Tensor) -> Tensor:
    first = call(x[:, :, :3], FwdCtx("denoise", 0, 3, LEVELS, tuple(1000 * s for s in LEVELS), 4, 6))
    call(first, FwdCtx("clean", 0, 3, (0.0,) * 3, (0.0,) * 3, 4, 6))
    second = call(x[:, :, 3:], FwdCtx("denoise", 3, 3, LEVELS, tuple(1000 * s for s in LEVELS), 4, 6))
    return torch.cat([first, second], 2)


def plain_velocity(x: Tensor, t: Tensor, text: Tensor, units: Tensor) -> Tensor:
    positions = grid_positions(x.shape[2], 4, 6)
    mask = units.repeat_interleave(24)[:, None] >= units.repeat_interleave(24)[None, :]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (rope_rotate(part, positions).transpose(1, 2) for part in (q, k))
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        return (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)

    return wan_forward(tiny_weights(channels=16), x, t[None], text, num_heads=HEADS, attend=attend)


@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_per_frame_timesteps_equal_the_plain_forward(cfg: float, model: Any, noise: Tensor) -> None:
    texts = (prompt(2), prompt(7))
    out = sample(model, driven(level_driver, 6), noise, *texts, cfg=cfg)
    sigmas = torch.tensor(LEVELS)

    def x0(x: Tensor, t: Tensor, units: Tensor) -> Tensor:
        cond, uncond = (plain_velocity(x, t, text, units)[:, :, -3:] for text in texts)
        return x[:, :, -3:] - sigmas[None, None, :, None, None] * (uncond + cfg * (cond - uncond))

    first = x0(noise[:, :, :3], 1000 * sigmas, torch.zeros(3))
    assert (out[:, :, :3] - first).abs().max() <= 5e-5
    units = torch.tensor([0, 0, 0, 1, 1, 1])
    both = torch.cat([out[:, :, :3], noise[:, :, 3:]], 2)
    second = x0(both, torch.cat([torch.zeros(3), 1000 * sigmas]), units)
    assert (out[:, :, 3:] - second).abs().max() <= 5e-5
    assert (out[:, :, 3:] - x0(both, torch.cat([torch.zeros(3), 1000 * sigmas.mean().expand(3)]), units)).abs().max() > 1e-2


# -- branches --------------------------------------------------------------------------------------------------------

TEXTS = (prompt(2), prompt(7))


def swapped(args: dict[str, Any]) -> list[Tensor]:
    import comfy.samplers

    conds = list(reversed(args["conds"]))
    return list(reversed(comfy.samplers.calc_cond_batch(args["model"], conds, args["input"], args["sigma"], args["model_options"])))


def layouts(model: Any, noise: Tensor, **options: Any) -> dict[str, Tensor]:
    """The same guided run with conditional and unconditional batched, swapped, in two calls, and changing between calls."""
    batches: list[int] = []

    def count(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        batches.append(x.shape[0])
        return executor(x, *args, **kwargs)

    counted = with_forward_wrapper(model, count)
    turned = counted.clone()
    turned.model_options["sampler_calc_cond_batch_function"] = swapped

    def run(patcher: Any, want: set[int]) -> Tensor:
        batches.clear()
        out = stream(patcher, noise, *TEXTS, cfg=3.0, policy=window(4, 1), block=2, **options)
        assert set(batches) == want
        return out

    results = {"batched": run(counted, {2}), "swapped": run(turned, {2})}
    with two_calls(model):
        results["two calls"] = run(counted, {1})
        results["two calls, swapped"] = run(turned, {1})
    with two_calls(model, lambda: sum(batches) // 2 % 2 == 0):  # every entry adds one, so this turns with every call
        results["changing"] = run(counted, {1, 2})
    return results


def test_every_layout_of_cond_and_uncond_is_equal(model: Any, noise: Tensor) -> None:
    results = layouts(model, noise)
    first = results.pop("batched")
    assert {name: float((out - first).abs().max()) for name, out in results.items() if (out - first).abs().max() > 2e-5} == {}
    assert (stream(model, noise, TEXTS[0], policy=window(4, 1), block=2) - first).abs().max() > 1e-2, "guidance has no effect"


def test_branches_told_by_their_place_would_differ(model: Any, noise: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastar_pack.nodes.host.hook import HostModel

    monkeypatch.setattr(HostModel, "_branches_of", lambda self, options: list(range(len(options["uuids"]))))
    monkeypatch.setattr(HostModel, "_claim", lambda self, layer: None)
    results = layouts(model, noise)
    assert (results["changing"] - results["batched"]).abs().max() > 1e-2


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

    with pytest.raises(UnsupportedError, match=r"overridden by .*test_hook\.thief.*Put the FAST-AR node after the node"):
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


# -- leaving no trace ------------------------------------------------------------------------------------------------


def test_the_model_is_as_it_was_after_a_run(model: Any, noise: Tensor) -> None:
    import comfy.samplers

    def stock() -> Tensor:
        return sample(model, comfy.samplers.ksampler("euler"), noise, *TEXTS, cfg=3.0, sigmas=(1.0, 0.6, 0.0))

    network = model.model.diffusion_model
    before, attributes = stock(), [set(vars(m)) for m in network.modules()]
    options = {key: value for key, value in model.model_options.items()}
    stream(model, noise, *TEXTS, cfg=3.0)
    assert torch.equal(stock(), before)
    assert [set(vars(m)) for m in network.modules()] == attributes
    assert model.model_options == options
    assert not model.wrappers or not any(model.wrappers.values())
    assert (stream(model, noise, TEXTS[0]) - before).abs().max() > 1e-2


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
    with pytest.raises(expected):
        stream(with_forward_wrapper(model, count), noise, TEXTS[0], on_step=on_step)
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


@pytest.mark.parametrize(("extra", "words"), [
    ({"area": (4, 4, 0, 0)}, "an area"),
    ({"mask": torch.ones(1, 8, 12)}, "a mask"),
    ({"start_percent": 0.2, "end_percent": 0.8}, "a timestep range"),
])
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
    for extra, words in (({"denoise_mask": noise}, "noise mask"), ({"model_options": {"context_handler": object()}}, "context windows"),
                         ({"model_options": {"multigpu_clones": [1]}}, "multi-GPU")):
        with pytest.raises(UnsupportedError, match=words):
            _check_request(holder, extra)
