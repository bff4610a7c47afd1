"""AnnSA and AnnCA under the host's own AR sampler, without our samplers (hosts from 0.27 on)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from fastar_pack.fastar_core.annsa import AnnSASettings
from fastar_pack.fastar_core.noise import seeded_normal
from host.host_tools import load_from_file
from tests_support import Host
from tiny.golden import load_golden

pytestmark = pytest.mark.cpu
SIGMAS = (1.0, 0.9375, 0.83333, 0.625, 0.0)


def test_the_stock_sampler_runs_with_both_modules(host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("comfy.ldm.wan.ar_model", reason="this host has no SamplerARVideo")
    import comfy.samplers

    from fastar_pack.nodes.host.patch import with_attention_settings

    model = load_from_file(load_golden("A6"), tmp_path)
    text = load_golden("A6").tensors["text.0"]
    text = torch.cat([text, torch.zeros(1, 30, text.shape[2])], 1)

    def stock(patched: Any) -> torch.Tensor:
        guider = comfy.samplers.CFGGuider(patched)
        guider.set_conds([[text, {}]], [])
        guider.set_cfg(1.0)
        noise = seeded_normal(0, (1, 16, 18, 8, 12))
        sampler = comfy.samplers.ksampler("ar_video", {"num_frame_per_block": 3})
        return guider.sample(noise, torch.zeros_like(noise), sampler, torch.tensor(SIGMAS), seed=7, disable_pbar=True)

    plain = stock(model)
    exact, _ = with_attention_settings(model, False, annsa=AnnSASettings(1.0, only_if_faster=False))
    exact = host.nodes["FastARAnnCA"]().patch(exact, "merge padding", 8, 4, 1, 4, 0.3, 1.0)[0]
    with caplog.at_level(logging.INFO):
        out = stock(exact)
    assert (out - plain).abs().max() <= 2e-5 * plain.abs().max()
    assert "'sparse': " in caplog.text
    assert "'merged': " in caplog.text
    fewer = host.nodes["FastARAnnSA"]().patch(model, 0.7, "kmeans", 0.3, "", False, False)[0]
    out = stock(fewer)
    assert out.isfinite().all()
    assert (out - plain).abs().max() > 1e-5
    assert torch.equal(stock(model), plain), "the model without the nodes is as it was"
