"""The hook: what reaches the cache, in which form, and what happens when another node is in the way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.engine_tools import HEADS, tiny_weights
from fastar_pack.fastar_core.attention import Attention
from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.noise import seeded_normal
from fastar_pack.fastar_core.policies.frame_cache import FrameCache
from host.host_tools import (
    NOISE,
    driven,
    plain_call,
    prompt,
    sample,
    stream,
    tiny_model,
    with_option,
)
from tests_support import Host
from tiny.wan_plain import grid_positions, rope_rotate, wan_forward

pytestmark = pytest.mark.cpu
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

        def attention_attend(one: Attention, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, **more: Any) -> Tensor:
            self.rotated.append((q.clone(), k.clone()))
            return attention(one, q, k, v, bias, **more)

        monkeypatch.setattr(FrameCache, "attend", attend)
        monkeypatch.setattr(Attention, "attend", attention_attend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_are_those_of_the_norms_bit_for_bit(
    dtype: torch.dtype, host: Host, noise: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    patcher = tiny_model(dtype)
    normed: dict[str, list[Tensor]] = {"norm_q": [], "norm_k": []}
    handles = [
        getattr(block.self_attn, name).register_forward_hook(lambda m, i, out, name=name: normed[name].append(out.clone()))
        for block in patcher.model.diffusion_model.blocks
        for name in normed
    ]
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


@pytest.mark.parametrize(
    "user", [{}, {"shift_t": 5.0}, {"scale_t": 0.5}, {"scale_y": 0.5, "scale_x": 2.0, "shift_y": 1.0}, {"scale_t": 0.5, "shift_t": 5.0}]
)
def test_the_users_rope_options_are_applied_as_the_host_would(
    user: dict[str, float], model: Any, noise: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    patcher = with_option(model, rope_options=user) if user else model
    q, k = host_rotation(patcher, noise)
    plain_q, _ = host_rotation(model, noise)
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
