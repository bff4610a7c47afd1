"""The SAMPLER node in the host's own Custom Sampling nodes, and the host after we are gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastar_pack.fastar_core.presets import get_preset, schedule
from host.stream_parts import HEIGHT, WIDTH, sample, text, tiny_model, tiny_wan_vae
from tests_support import Host

pytestmark = pytest.mark.cpu


def sigmas_of(preset: str) -> torch.Tensor:
    return torch.tensor([*schedule(get_preset(preset)).sigmas, 0.0])


def run_host(model: Any, sampler: Any, seed: int = 5, preset: str = "self_forcing", cfg: float = 1.0) -> Any:
    """Outputs of SamplerCustomAdvanced with a stock guider and stock noise."""
    from comfy_extras import nodes_custom_sampler as custom

    guider = custom.CFGGuider.execute(model, text(1), text(2), cfg)[0]
    noise = custom.RandomNoise.execute(seed)[0]
    latent = {"samples": torch.zeros(1, 16, 6, HEIGHT // 8, WIDTH // 8)}
    return custom.SamplerCustomAdvanced.execute(noise, guider, sampler, sigmas_of(preset), latent)


def through_host(model: Any, sampler: Any, **given: Any) -> torch.Tensor:
    return run_host(model, sampler, **given)[0]["samples"]


def make(host: Host, preset: str = "self_forcing", cache: str = "preset", window: int = 9, sink: int = 3) -> Any:
    return host.nodes["FastARSampler"]().make(preset, cache, window, sink)[0]


@pytest.mark.parametrize("preset", ["self_forcing", "causal_forcing_framewise_2step"])
def test_equals_the_streaming_node(host: Host, preset: str) -> None:
    model = tiny_model()
    node = sample(host, model, tiny_wan_vae(), preset=preset)[0]
    out = through_host(model, make(host, preset), preset=preset)
    assert torch.equal(out, node)
    other = through_host(model, make(host, preset), preset=preset, seed=6)
    assert not torch.equal(out, other)


def test_equals_the_streaming_node_with_cfg(host: Host) -> None:
    model = tiny_model()
    node = sample(host, model, tiny_wan_vae(), cfg=3.0, negative=text(2))[0]
    assert torch.equal(through_host(model, make(host), cfg=3.0), node)


def test_both_outputs_hold_everything(host: Host) -> None:
    out = run_host(tiny_model(), make(host))
    assert torch.equal(out[0]["samples"], out[1]["samples"])


def test_the_callback_never_falls_and_shows_the_newest_frame(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    import latent_preview

    seen: list[tuple[int, Any, int]] = []
    monkeypatch.setattr(latent_preview, "prepare_callback", lambda model, steps, x0_output=None:
                        lambda step, x0, x, total: seen.append((step, x0.clone(), total)))
    through_host(tiny_model(), make(host))
    ticks = [step for step, _, _ in seen]
    assert ticks == sorted(ticks)
    assert (min(ticks), max(ticks)) == (0, 3)
    assert {total for _, _, total in seen} == {4}
    assert [x0.shape[2] for _, x0, _ in seen] == [1] * 8 + [6]
    final = seen[-1][1]
    assert torch.equal(seen[3][1], final[:, :, 2:3])
    assert not torch.equal(seen[3][1], final[:, :, 0:1])


def test_refuses_what_cannot_work(host: Host) -> None:
    from comfy_extras import nodes_custom_sampler as custom

    from fastar_pack.fastar_core.errors import FastARError

    model = tiny_model()
    with pytest.raises(FastARError, match="choose preset"):
        through_host(model, make(host, "auto"))
    with pytest.raises(FastARError, match="window to 6"):
        through_host(model, make(host, cache="sink_window", window=4, sink=3))
    split = custom.SplitSigmas.execute(sigmas_of("self_forcing"), 2)[0]
    guider = custom.BasicGuider.execute(model, text(1))[0]
    latent = {"samples": torch.zeros(1, 16, 3, HEIGHT // 8, WIDTH // 8)}
    with pytest.raises(FastARError, match="end with 0"):
        custom.SamplerCustomAdvanced.execute(custom.RandomNoise.execute(1)[0], guider, make(host), split, latent)


def test_the_host_is_as_before_without_us(host: Host) -> None:
    """The stock sampler gives the same bytes on the same model before and after our runs, failed ones included."""
    import comfy.samplers

    model = tiny_model()
    euler = comfy.samplers.sampler_object("euler")
    functions = ("comfy.ldm.wan.model.optimized_attention", "comfy.samplers.calc_cond_batch",
                 "comfy.samplers.sampling_function")
    held = [_named(name) for name in functions]
    options = repr(model.model_options)
    before = through_host(model, euler)
    ours = through_host(model, make(host))
    with pytest.raises(Exception, match="choose preset"):
        through_host(model, make(host, "auto"))
    sample(host, model, tiny_wan_vae())
    assert torch.equal(through_host(model, euler), before)
    assert not torch.equal(ours, before)
    assert [_named(name) for name in functions] == held
    assert repr(model.model_options) == options
    assert not any("fastar" in str(key) for key in model.wrappers)


def _named(path: str) -> Any:
    import importlib

    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
