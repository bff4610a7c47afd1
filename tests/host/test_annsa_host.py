"""AnnSA in streaming runs on the host's own model, alone and with AnnCA and TempCache, through the settings the nodes write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from core.annsa_tools import SPARSE
from fastar_pack.fastar_core.annca import AnnCASettings
from fastar_pack.fastar_core.noise import seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.sigmas import SigmaSchedule
from fastar_pack.fastar_core.tempcache.settings import TempCacheSettings
from host.host_tools import prompt, stream, tiny_model
from tests_support import Host

pytestmark = pytest.mark.cpu
NOISE = (1, 16, 18, 8, 12)
STEPS = SigmaSchedule((1.0, 0.8, 0.5))
TEXT = prompt(2)
ALL = replace(SPARSE, density=1.0)
TEMPCACHE = PolicySettings("tempcache", sink_frames=1, tempcache=TempCacheSettings(budget_frames=9.0, recent_frames=3, threshold=0.6))


@pytest.fixture(scope="module")
def model(host: Host) -> Any:
    return tiny_model()


@pytest.mark.parametrize("buckets", ["kmeans", "sign", "shared"])
@pytest.mark.parametrize("policy", [PolicySettings(), TEMPCACHE], ids=["full", "tempcache"])
def test_visiting_everything_is_dense_with_both_branches(model: Any, buckets: str, policy: PolicySettings) -> None:
    noise, report = seeded_normal(1, NOISE), {}
    plain = stream(model, noise, TEXT, prompt(7), cfg=2.0, policy=policy, schedule=STEPS)
    out = stream(model, noise, TEXT, prompt(7), cfg=2.0, policy=policy, schedule=STEPS, annsa=replace(ALL, buckets=buckets), report=report)
    assert (out - plain).abs().max() <= 2e-4 * plain.abs().max()
    found = report["annsa"]
    assert found["calls"]["sparse"] >= 2 * 2 * 2 * 3, "two branches, layers, steps in three blocks"
    assert found["density"] == pytest.approx(1.0)
    assert found["calls"]["dense: noisy step"] == 2 * 2 * 6


def test_the_pairs_of_a_run_are_those_of_its_schedule(model: Any) -> None:
    noise, report = seeded_normal(1, NOISE), {}
    plain = stream(model, noise, TEXT, schedule=STEPS)
    out = stream(model, noise, TEXT, schedule=STEPS, annsa=replace(SPARSE, density=0.6, dense_layers=(1,)), report=report)
    calls = report["annsa"]["calls"]
    assert calls["dense: noisy step"] == 6 * 2
    assert calls["dense: layer in the list"] == 6 * 2
    assert calls["sparse"] + calls["dense: always visible keys use up the density"] + calls.get(
        "dense: no history beyond the always visible frames", 0) == 6 * 2
    assert calls["sparse"] >= 6
    assert out.isfinite().all()
    assert (out - plain).abs().max() > 1e-6


def test_all_three_modules_together(model: Any) -> None:
    noise, report = seeded_normal(1, NOISE), {}
    text = torch.cat([TEXT, torch.zeros(1, 40, TEXT.shape[2])], 1)
    plain = stream(model, noise, text, policy=TEMPCACHE, schedule=STEPS)
    out = stream(model, noise, text, policy=TEMPCACHE, schedule=STEPS, annsa=ALL, annca=AnnCASettings(), report=report)
    assert (out - plain).abs().max() <= 2e-4 * plain.abs().max()
    assert report["annca"]["prompts"] == [{"rows": 45, "distinct": 6}]
    assert report["annsa"]["calls"]["sparse"] > 0
    assert report["policy"] == "tempcache"


def test_the_nodes_reach_both_samplers(host: Host, model: Any) -> None:
    from fastar_pack.nodes.host.plain_sampler import PlainSampler
    from host.host_tools import sample

    annsa = host.nodes["FastARAnnSA"]().patch(model, 0.6, "kmeans", 0.3, "", False, False)[0]
    both = host.nodes["FastARAnnCA"]().patch(annsa, "merge padding", 8, 4, 1, 4, 0.3, 1.0)[0]
    settings = both.model_options["transformer_options"]["fastar"]
    assert settings.annsa is not None
    assert settings.annca is not None
    assert "fastar" not in model.model_options.get("transformer_options", {})
    seen: list[Any] = []
    import fastar_pack.nodes.host.plain_sampler as module

    true = module.make_stream_sampler
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "make_stream_sampler", lambda request: seen.append(request) or true(request))
        sampler = PlainSampler("self_forcing", "preset", 12, 3)
        import comfy.samplers

        sample(both, comfy.samplers.KSAMPLER(sampler.sample), seeded_normal(1, (1, 16, 6, 8, 12)), TEXT, sigmas=(1.0, 0.8, 0.5, 0.0))
    assert seen[0].annsa is settings.annsa
    assert seen[0].annca is settings.annca
    assert set(seen[0].report) >= {"annca", "annsa"}
