"""AnnCA and AnnSA on whole-video models of the host, through the nodes: off is bit-equal, density 1 and the pad merge are exact, calls
are counted, other packs keep their place."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from fastar_pack.fastar_core.errors import UnsupportedError
from host.host_tools import options_of, with_forward_wrapper, with_option
from tests_support import Host
from tiny.other_models import CONFIGS, build, latent, sample

pytestmark = pytest.mark.cpu
KINDS = ["wan t2v", "wan i2v", "ltxv", "hunyuan", "mochi", "cogvideox"]
SELF_CALLS = {"wan t2v": 2, "wan i2v": 2, "ltxv": 2, "hunyuan": 3, "mochi": 1, "cogvideox": 2}
CROSS = ("wan t2v", "wan i2v")
SA = {"density": 0.5, "buckets": "kmeans", "dense_share": 0.3, "dense_layers": "", "only_if_faster": False, "calibrate": False}
CA = {"mode": "merge padding", "bits": 8, "tables": 4, "probes": 1, "min_kept": 4, "start_percent": 0.3, "end_percent": 1.0}


@pytest.fixture(scope="module")
def models(host: Host) -> dict[str, Any]:
    known: dict[str, Any] = {}

    class Lazy(dict):
        def __missing__(self, kind: str) -> Any:
            import comfy.model_detection

            if comfy.model_detection.model_config_from_unet_config(dict(CONFIGS[kind])) is None:
                pytest.skip(f"this host has no {kind}")
            known[kind] = self[kind] = (build(kind), None)
            self[kind] = (self[kind][0], sample(self[kind][0], kind))
            return self[kind]

    return Lazy()


def annsa(host: Host, model: Any, **changes: Any) -> Any:
    return host.nodes["FastARAnnSA"]().patch(model, **{**SA, **changes})[0]


def annca(host: Host, model: Any, **changes: Any) -> Any:
    return host.nodes["FastARAnnCA"]().patch(model, **{**CA, **changes})[0]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Reports of whole-video runs."""
    from fastar_pack.nodes.host.whole_video import WholeVideoRun

    reports: list[dict[str, Any]] = []
    true = WholeVideoRun.close
    monkeypatch.setattr(WholeVideoRun, "close", lambda run: reports.append(run.report()) or true(run))
    return reports


@pytest.mark.parametrize("kind", KINDS)
def test_off_settings_leave_the_model_itself(host: Host, models: dict[str, Any], kind: str) -> None:
    model, plain = models[kind]
    assert annsa(host, model, density=1.0) is model
    assert annca(host, model, mode="off") is model
    assert torch.equal(sample(model, kind), plain)


@pytest.mark.parametrize("buckets", ["kmeans", "sign"])
@pytest.mark.parametrize("kind", KINDS)
def test_sparse_runs_where_it_should_and_counts(host: Host, models: dict[str, Any], told: list[dict[str, Any]], kind: str,
                                                buckets: str) -> None:
    model, plain = models[kind]
    out = sample(annsa(host, model, buckets=buckets), kind)
    report = told[-1]
    layers = SELF_CALLS[kind]
    assert report["self_attention_calls"] == 4 * layers
    assert report["annsa"]["calls"] == {"dense: noisy step": layers, "sparse": 3 * layers}
    assert 0.3 < report["annsa"]["density"] <= 0.51
    assert out.isfinite().all()
    assert (out - plain).abs().max() > 1e-6
    assert torch.equal(sample(model, kind), plain), "the model that was patched is untouched"


@pytest.mark.parametrize("kind", KINDS)
def test_visiting_everything_is_dense(host: Host, models: dict[str, Any], told: list[dict[str, Any]], kind: str) -> None:
    from fastar_pack.fastar_core.annsa import AnnSASettings
    from fastar_pack.nodes.host.patch import with_attention_settings

    model, plain = models[kind]
    patched, _ = with_attention_settings(model, False, annsa=AnnSASettings(1.0, dense_share=0.0, only_if_faster=False))
    out = sample(patched, kind)
    assert told[-1]["annsa"]["calls"] == {"sparse": 4 * SELF_CALLS[kind]}
    assert (out - plain).abs().max() <= 1e-4 * plain.abs().max()


@pytest.mark.parametrize("kind", CROSS)
def test_the_pad_merge_is_exact(host: Host, models: dict[str, Any], told: list[dict[str, Any]], kind: str) -> None:
    model = models[kind][0]
    out = sample(annca(host, model), kind, cfg=3.0)
    plain = sample(model, kind, cfg=3.0)
    assert (out - plain).abs().max() <= 1e-5 * plain.abs().max()
    calls = told[-1]["annca"]["calls"]
    assert set(calls) == {"merged"}, "image rows are no text"
    assert calls["merged"] % 2 == 0
    assert sorted(p["distinct"] for p in told[-1]["annca"]["prompts"]) == [3, 8]


@pytest.mark.parametrize("kind", CROSS)
def test_the_keep_rule_acts_in_its_steps(host: Host, models: dict[str, Any], told: list[dict[str, Any]], kind: str) -> None:
    model, plain = models[kind]
    out = sample(annca(host, model, mode="quant", min_kept=1), kind)
    assert told[-1]["annca"]["calls"] == {"merged": 2, "kept by frame": 6}
    assert out.isfinite().all()
    assert (out - plain).abs().max() < plain.abs().max()


def test_joint_models_say_that_annca_does_not_apply(host: Host, models: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    model = models["hunyuan"][0]
    with caplog.at_level(logging.WARNING):
        assert annca(host, model) is model
    assert "not applicable" in caplog.text
    assert "joint attention" in caplog.text


def test_an_unknown_class_is_left_alone(host: Host, models: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    model = models["wan t2v"][0]

    class Strange(type(model.model.diffusion_model)):
        pass

    network = model.model.diffusion_model
    true = network.__class__
    network.__class__ = Strange
    try:
        with caplog.at_level(logging.WARNING):
            assert annsa(host, model) is model
    finally:
        network.__class__ = true
    assert "Strange" in caplog.text
    assert "not among those known" in caplog.text


@pytest.mark.parametrize("sampler", ["heun", "dpmpp_2s_ancestral", "euler"])
def test_steps_are_told_by_sigma_whatever_the_sampler(host: Host, models: dict[str, Any], told: list[dict[str, Any]],
                                                      monkeypatch: pytest.MonkeyPatch, sampler: str) -> None:
    from fastar_pack.nodes.host.whole_video import WholeVideoRun

    seen: list[float] = []
    ran: list[set[tuple[float, int]]] = []
    call, close = WholeVideoRun.call, WholeVideoRun.close
    monkeypatch.setattr(WholeVideoRun, "call", lambda run, ex, x, sigma, *a, **k: seen.append(float(sigma.max())) or
                        call(run, ex, x, sigma, *a, **k))
    monkeypatch.setattr(WholeVideoRun, "close", lambda run: ran.append(set(run.sparse.tally.ran)) or close(run))
    model = models["wan t2v"][0]
    sample(annsa(host, model, dense_layers="0", dense_share=0.5), "wan t2v", sampler, steps=6)
    import comfy.samplers

    schedule = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 6).tolist()
    limit = schedule[3] * 1.0001
    assert ran[-1] == {(sigma, 1) for sigma in seen if sigma <= limit}
    if sampler != "euler":
        assert len(seen) > 6 or any(sigma not in schedule for sigma in seen)


def test_another_override_does_the_dense_work_and_a_later_one_is_noticed(host: Host, models: dict[str, Any],
                                                                         told: list[dict[str, Any]]) -> None:
    model, _ = models["wan t2v"]
    calls: list[int] = []

    def theirs(func: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(k.shape[1])
        return func(q, k, v, heads, *args, **kwargs)

    sample(annsa(host, with_option(model, optimized_attention_override=theirs)), "wan t2v")
    assert len(calls) == 2 + 8, "self-attention of the noisy step in both layers, and every text attention"

    def steal(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        options_of(args, kwargs)["optimized_attention_override"] = theirs
        return executor(x, *args, **kwargs)

    with pytest.raises(UnsupportedError, match=r"not active: its attention was overridden by .*theirs"):
        sample(with_forward_wrapper(annsa(host, model), steal), "wan t2v")

    def strip(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        options_of(args, kwargs)["patches_replace"] = {}
        return executor(x, *args, **kwargs)

    with pytest.raises(UnsupportedError, match=r"saw no attention"):
        sample(with_forward_wrapper(annsa(host, model), strip), "wan t2v")


def test_masked_calls_stay_dense(host: Host, models: dict[str, Any], told: list[dict[str, Any]]) -> None:
    model, plain = models["wan t2v"]

    def masked(func: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any) -> Tensor:
        return func(q, k, v, heads, *args, **kwargs)

    def add_mask(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        options = options_of(args, kwargs)
        ours = options["optimized_attention_override"]

        class Masking:
            def __call__(self, func: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> Tensor:
                return ours(func, q, k, v, *rest, **{**more, "mask": torch.zeros(q.shape[1], k.shape[1])})

            def __eq__(self, other: object) -> bool:
                return other == ours

            __hash__ = None  # type: ignore[assignment]

        options["optimized_attention_override"] = Masking()
        return executor(x, *args, **kwargs)

    out = sample(with_forward_wrapper(annsa(host, annca(host, model)), add_mask), "wan t2v")
    assert told[-1]["masked_calls"] > 0
    assert "sparse" not in told[-1]["annsa"]["calls"]
    assert (out - plain).abs().max() <= 1e-5 * plain.abs().max()


def test_any_size_and_frame_count(host: Host, models: dict[str, Any], told: list[dict[str, Any]]) -> None:
    model, _ = models["wan t2v"]
    for frames, rows, columns in ((7, 10, 14), (5, 9, 13), (3, 6, 6)):
        out = sample(annsa(host, model, density=0.6), "wan t2v", noise=latent("wan t2v", frames, rows, columns))
        assert out.isfinite().all()
        assert told[-1]["annsa"]["calls"]["sparse"] == 6
    sample(annsa(host, model), "wan t2v", noise=latent("wan t2v", 1))
    assert told[-1]["annsa"]["calls"] == {"dense: noisy step": 2, "dense: one frame": 6}


def test_calibration_changes_nothing_and_names_layers(host: Host, models: dict[str, Any], told: list[dict[str, Any]]) -> None:
    model, plain = models["wan t2v"]
    assert torch.equal(sample(annsa(host, model, calibrate=True, density=0.4), "wan t2v"), plain)
    found = told[-1]["annsa"]
    assert set(found["layer_recall"]) == {0, 1}
    assert all(0.3 < value < 1 for value in found["layer_recall"].values())
    assert found["keep_dense"]


def test_multi_gpu_clones_are_refused(host: Host, models: dict[str, Any]) -> None:
    patched = annsa(host, models["wan t2v"][0])
    patched.model_options["multigpu_clones"] = {"another": object()}
    with pytest.raises(UnsupportedError, match=r"multi-GPU clones"):
        sample(patched, "wan t2v")
