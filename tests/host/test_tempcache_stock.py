"""TempCache in front of the host's own AR sampler (hosts from 0.27 on)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastar_pack.fastar_core.noise import seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from host.host_tools import load_from_file, stream, with_option
from host.tempcache_parts import ALL, OTHER, SAME, far, patch, policy_of
from tests_support import Host
from tiny.golden import load_golden

pytestmark = pytest.mark.cpu
SIGMAS = (1.0, 0.9375, 0.83333, 0.625, 0.0)


@pytest.fixture
def causal(host: Host, tmp_path: Path) -> Any:
    """A model of the host's causal class; skips on hosts without one."""
    pytest.importorskip("comfy.ldm.wan.ar_model", reason="this host has no SamplerARVideo")
    return load_from_file(load_golden("A6"), tmp_path)


def stock(model: Any, frames: int = 12, cfg: float = 1.0, block: int = 3, batch: int = 1, seed: int = 7) -> Tensor:
    """Latents of the stock AR sampler through a stock guider."""
    import comfy.samplers

    given = load_golden("A6").tensors["text.0"]
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds([[given, {}]], [[seeded_normal(3, tuple(given.shape)), {}]])
    guider.set_cfg(cfg)
    noise = seeded_normal(0, (batch, 16, frames, 8, 12))
    sampler = comfy.samplers.ksampler("ar_video", {"num_frame_per_block": block})
    return guider.sample(noise, torch.zeros_like(noise), sampler, torch.tensor(SIGMAS), seed=seed, disable_pbar=True)


def full_cache(model: Any) -> Any:
    from fastar_pack.nodes.host.patch import with_settings

    return with_settings(model, policy=PolicySettings())


def test_the_stock_sampler_runs_through_our_cache(host: Host, causal: Any, caplog: pytest.LogCaptureFixture) -> None:
    plain = stock(causal)
    assert far(stock(full_cache(causal)), plain) <= 5e-6
    assert far(stock(patch(host, causal, **ALL)[0]), plain) <= 1e-5
    with caplog.at_level(logging.INFO):
        merged = stock(patch(host, causal, budget=6, recent=3)[0])
    assert far(merged, plain) > OTHER
    assert far(merged[:, :, :3], plain[:, :, :3]) <= 5e-6
    assert "by the stock AR sampler; the cache keeps everything, merged into 6 latent frames (sink 1, recent 3): TempCache" in caplog.text
    assert "'step_recall'" in caplog.text
    assert torch.equal(stock(causal), plain), "the model without the node is as it was"


def test_its_full_length_buffers_are_not_allocated(host: Host, causal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from comfy.ldm.wan.ar_model import CausalWanModel

    def refuse(*sizes: Any, **options: Any) -> None:
        raise AssertionError("the stock buffers were asked for")

    monkeypatch.setattr(CausalWanModel, "init_kv_caches", refuse)
    with pytest.raises(AssertionError, match="stock buffers"):
        stock(causal)
    assert torch.isfinite(stock(patch(host, causal, budget=6, recent=3)[0])).all()


@pytest.mark.parametrize("settings", [ALL, {"budget": 6, "recent": 3}])
def test_cfg_and_batches_in_the_stock_sampler_are_those_of_our_own(host: Host, causal: Any, settings: dict[str, Any]) -> None:
    """The stock cache mixes conditional and unconditional keys; here each entry has a cache of its own."""
    from fastar_pack.fastar_core.sigmas import SigmaSchedule
    from fastar_pack.fastar_core.tempcache.fitting import fit_family

    model = patch(host, causal, **settings)[0]
    given = load_golden("A6").tensors["text.0"]
    noise, negative = seeded_normal(0, (2, 16, 12, 8, 12)), seeded_normal(3, tuple(given.shape))
    policy = fit_family(policy_of(model), None, 3)
    ours = stream(causal, noise, given, negative, 3.0, policy, SigmaSchedule(SIGMAS[:-1]), 3, 7)
    theirs = causal.model.process_latent_in(stock(model, cfg=3.0, batch=2))
    assert far(ours, theirs) <= SAME
    assert far(theirs, causal.model.process_latent_in(stock(model, batch=2))) > OTHER


def test_given_frames_in_the_stock_sampler(host: Host, causal: Any) -> None:
    first = seeded_normal(4, (1, 16, 1, 8, 12))
    given = with_option(causal, ar_config={"initial_latent": first})
    plain = stock(given, frames=10)
    assert far(stock(full_cache(given), frames=10), plain) <= 5e-6
    assert far(stock(patch(host, given, **ALL)[0], frames=10), plain) <= 1e-5
    assert far(plain[:, :, :1], first) <= 1e-5
    assert far(stock(patch(host, given, budget=6, recent=3)[0], frames=10), plain) > OTHER
    many = with_option(causal, ar_config={"initial_latent": seeded_normal(4, (1, 16, 5, 8, 12))})
    assert far(stock(patch(host, many, **ALL)[0], frames=11), stock(many, frames=11)) <= 1e-5, "more of them than a block"
