"""The TempCache node on the real host: before our samplers and beside other packs."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from core.engine_tools import HEADS
from fastar_pack.fastar_core.attention import Attention
from fastar_pack.fastar_core.errors import ConfigError, MemoryPlanError, UnsupportedError
from fastar_pack.fastar_core.noise import seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.presets import get_preset
from fastar_pack.fastar_core.settings import FastARSettings
from fastar_pack.fastar_core.tempcache.settings import TempCacheSettings
from host.host_tools import NOISE, prompt, stream, with_option
from host.host_tools import tiny_model as small_model
from host.stream_parts import sample, text, tiny_model, tiny_wan_vae
from host.tempcache_parts import ALL, MERGING, OTHER, SAME, far, patch, policy_of
from host.test_plain_sampler import make, through_host
from tests_support import Host
from tiny.wan_plain import dense_attention

pytestmark = pytest.mark.cpu
LENGTH = 117  # 30 latent frames


@pytest.fixture
def parts(host: Host) -> tuple[Any, Any]:
    return tiny_model(), tiny_wan_vae()


# -- the node --------------------------------------------------------------------------------------------------------


def test_off_passes_the_very_model_on(host: Host, parts: tuple[Any, Any]) -> None:
    model, plan = patch(host, parts[0], "off")
    assert model is parts[0]
    assert plan.startswith("TempCache is off")


@pytest.mark.parametrize("preset", ["quality", "balanced", "small"])
def test_a_preset_goes_onto_a_clone(host: Host, parts: tuple[Any, Any], preset: str) -> None:
    from fastar_pack.fastar_core.tempcache.plan import PRESETS

    model, plan = patch(host, parts[0], preset)
    assert model is not parts[0]
    assert "fastar" not in parts[0].model_options["transformer_options"]
    assert policy_of(model).tempcache == PRESETS[preset]
    frames = f"{PRESETS[preset].budget_frames:g} latent frames"
    parts_kept = f"(sink 1, recent {PRESETS[preset].recent_frames})"
    assert plan.startswith(f"{preset}: the cache keeps everything, merged into {frames} {parts_kept}. At 832 x 480 pixels")
    assert f"is full after {frames} at the latest" in plan


def test_every_knob_arrives(host: Host, parts: tuple[Any, Any]) -> None:
    model, plan = patch(host, parts[0], "small", 40, 2.5, sink=2, recent=0, threshold=0.2, reindex="on", history="int8",
                        similarity="logit", space="pre", representative="last", search="lsh")
    found = policy_of(model)
    assert found.sink_frames == 2
    assert found.tempcache is not None
    wanted = {"budget_frames": 40.0, "memory_gb": 2.5, "recent_frames": 0, "threshold": 0.2, "floor": 0.2, "reindex_span": 0,
              "history_type": "int8", "similarity": "logit", "space": "pre", "representative": "last", "search": "lsh"}
    assert {name: getattr(found.tempcache, name) for name in wanted} == wanted
    assert "moved to within 18 latent frames" in plan


def test_the_plan_names_the_familys_own_size_and_sink(host: Host, parts: tuple[Any, Any]) -> None:
    loaded = with_option(parts[0], fastar=FastARSettings(preset=get_preset("longlive1_infinity")))
    _, plan = patch(host, loaded, "small")
    assert "(sink 3, recent 3)" in plan
    assert "moved to within 9 latent frames" in plan, "positions inside a window of 12 with blocks of 3"
    assert "is full after" in patch(host, loaded, "small", memory_gb=-1)[1]
    assert "are free now; the run asks again" in patch(host, loaded, "small", memory_gb=-1)[1]


def test_what_cannot_work_is_refused_in_words(host: Host, parts: tuple[Any, Any]) -> None:
    with pytest.raises(ConfigError, match="a budget of 4 latent frames holds no history beside 3 sink and 3 recent frames; set it to 7"):
        patch(host, parts[0], "small", 4, sink=3)
    with pytest.raises(ConfigError, match=r"memory_gb is -0\.5; set it to 0"):
        patch(host, parts[0], "small", 0, -0.5)
    model, plan = patch(host, parts[0], "small", 0, 1e-6)
    assert plan.startswith("small: at 832 x 480 pixels and one prompt this cannot run: even a budget of 5 latent frames does not fit")
    with pytest.raises(MemoryPlanError, match="even a budget of 5"):
        sample(host, model, parts[1])
    other = tiny_model()
    other.model.diffusion_model.model_type = "i2v"
    with pytest.raises(UnsupportedError, match="text-to-video"):
        patch(host, other)


# -- our samplers ----------------------------------------------------------------------------------------------------


def test_everything_kept_is_the_full_cache_and_merging_is_not(host: Host, parts: tuple[Any, Any]) -> None:
    full = sample(host, *parts, length=LENGTH, cache="full")[0]
    kept = sample(host, patch(host, parts[0], **ALL)[0], parts[1], length=LENGTH)[0]
    merged = sample(host, patch(host, parts[0], **MERGING)[0], parts[1], length=LENGTH)[0]
    assert far(kept, full) <= SAME
    assert far(merged, full) > OTHER
    assert far(merged[:, :, :6], full[:, :, :6]) <= SAME, "nothing has been merged yet"
    assert torch.isfinite(merged).all()


def test_the_sampler_node_makes_the_same(host: Host, parts: tuple[Any, Any]) -> None:
    preset = "causal_forcing_framewise_2step"
    model = patch(host, parts[0], budget=3, recent=0)[0]
    out = through_host(model, make(host, preset), preset=preset)
    assert torch.equal(out, sample(host, model, parts[1], preset=preset)[0])
    assert far(out, through_host(parts[0], make(host, preset), preset=preset)) > OTHER


@pytest.mark.parametrize("cfg", [1.0, 3.0])
def test_the_plan_is_printed_and_true_and_blocks_are_reported(host: Host, parts: tuple[Any, Any], caplog: pytest.LogCaptureFixture,
                                                              cfg: float) -> None:
    model = patch(host, parts[0], **MERGING)[0]
    with caplog.at_level(logging.INFO):
        report = json.loads(sample(host, model, parts[1], length=LENGTH, cfg=cfg, negative=text(2), batch_size=2)[3])
    assert "the cache keeps everything, merged into 9 latent frames (sink 1, recent 3): TempCache holds" in caplog.text
    assert "its history is full after 9 latent frames at the latest" in caplog.text
    assert report["bytes"]["kv_planned"] == pytest.approx(report["bytes"]["kv_peak"], rel=0.05)
    kept = report["settings"]["cache"]
    assert (kept["policy"], kept["sink_frames"], kept["tempcache"]["budget_frames"]) == ("tempcache", 1, 9)
    told = report["counts"]["cache"]
    assert len(told) == report["counts"]["branches"] == (1 if cfg == 1 else 2)
    for branch in told.values():
        blocks = branch["blocks"]
        assert [b["start"] for b in blocks] == list(range(0, 27, 3)), "the clean pass of the last block is not made"
        assert all(len(b["step_recall"]) == 2 for b in blocks)
        assert sum(b["merged"][0] + b["evicted"][0] for b in blocks) > 0
        assert blocks[-1]["density"] == pytest.approx((9 + 3) / (27 + 3))


@pytest.mark.parametrize(("preset", "sink"), [("rolling_forcing", 3), ("causal_forcing_framewise_2step", 1), ("longlive1", 3),
                                              ("krea", 1), ("demo", 1)])
def test_every_kind_of_family_runs(host: Host, parts: tuple[Any, Any], preset: str, sink: int) -> None:
    base = sample(host, *parts, length=LENGTH, preset=preset, cache="full")[0]
    latents, _, _, report = sample(host, patch(host, parts[0], "small", 9)[0], parts[1], length=LENGTH, preset=preset)
    assert latents.shape == base.shape
    assert torch.isfinite(latents).all()
    assert json.loads(report)["settings"]["cache"]["sink_frames"] == sink
    kept = sample(host, patch(host, parts[0], **ALL)[0], parts[1], length=LENGTH, preset=preset)[0]
    if get_preset(preset).positions != "slot":
        assert far(kept, base) <= SAME


def test_a_memory_limit_lowers_the_budget(host: Host, parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from fastar_pack.nodes.host import memory

    def budget(memory_gb: float) -> tuple[float, int]:
        report = json.loads(sample(host, patch(host, parts[0], budget=20, memory_gb=memory_gb)[0], parts[1], length=LENGTH)[3])
        return report["settings"]["cache"]["tempcache"]["budget_frames"], report["bytes"]["kv_peak"]

    free, whole = budget(0)
    limit = 0.7e-9 * whole
    assert free == 20
    fewer, held = budget(limit)
    assert fewer < 20
    assert held <= limit * 1e9 < whole
    assert budget(-1)[0] == 20, "there is room for it"
    call = int(parts[0].model.memory_required([1, 16, 3, 4, 6]))
    monkeypatch.setattr(memory, "room_for", lambda device: call + int(limit * 1e9))
    assert budget(-1)[0] == fewer
    with pytest.raises(MemoryPlanError, match=f"set the budget of FAST-AR TempCache to {fewer:g} latent frames or fewer"):
        budget(0)


def test_prompts_that_change(host: Host, parts: tuple[Any, Any]) -> None:
    model = patch(host, parts[0], **MERGING)[0]
    prompts = [(0, text(1)), (15, text(3))]
    runs = {mode: sample(host, model, parts[1], length=LENGTH, prompts=prompts, prompt_switch=mode) for mode in
            ("none", "keep", "drop", "rebuild")}
    calls = {mode: json.loads(run[3])["counts"]["model_calls"] for mode, run in runs.items()}
    assert [calls[mode].get("recache", 0) for mode in runs] == [0, 1, 1, 0]
    assert calls["rebuild"]["prefill"] == 5
    plain = sample(host, model, parts[1], length=LENGTH)[0]
    for mode, run in runs.items():
        assert torch.equal(run[0][:, :, :15], plain[:, :, :15]), mode
        assert torch.isfinite(run[0]).all()
    ends = [run[0][:, :, 18:] for run in runs.values()]
    assert all(far(a, b) > 1e-3 for i, a in enumerate(ends) for b in ends[:i])


# -- other packs -----------------------------------------------------------------------------------------------------


def test_a_patcher_of_another_pack_stays_what_it_is(host: Host, parts: tuple[Any, Any]) -> None:
    import comfy.model_patcher

    class QuantisedPatcher(comfy.model_patcher.ModelPatcher):
        """As packs for quantised files do: a class of their own that survives clone()."""

        marks = 0

        def clone(self, *args: Any, **kwargs: Any) -> Any:
            copy = super().clone(*args, **kwargs)
            copy.__class__ = QuantisedPatcher
            copy.marks = self.marks + 1
            return copy

    model = parts[0].clone()
    model.__class__ = QuantisedPatcher
    patched = patch(host, model, **MERGING)[0]
    assert type(patched) is QuantisedPatcher
    assert patched.marks == 1
    assert torch.equal(sample(host, patched, parts[1], length=LENGTH)[0], sample(host, patch(host, parts[0], **MERGING)[0], parts[1],
                                                                               length=LENGTH)[0])


def test_weight_patches_work_before_and_after(host: Host, parts: tuple[Any, Any]) -> None:
    key = "diffusion_model.blocks.0.self_attn.v.weight"
    weight = parts[0].model.state_dict()[key]
    patches = {key: ("diff", (0.5 * torch.randn(weight.shape),))}

    def with_lora(model: Any) -> Any:
        clone = model.clone()
        assert clone.add_patches(patches, 1.0)
        return clone

    before = sample(host, patch(host, with_lora(parts[0]), **MERGING)[0], parts[1], length=LENGTH)[0]
    after = sample(host, with_lora(patch(host, parts[0], **MERGING)[0]), parts[1], length=LENGTH)[0]
    assert torch.equal(before, after)
    assert far(before, sample(host, patch(host, parts[0], **MERGING)[0], parts[1], length=LENGTH)[0]) > OTHER


def test_another_packs_attention_does_the_dense_work(host: Host, parts: tuple[Any, Any]) -> None:
    rows: list[int] = []

    def theirs(func: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any) -> Tensor:
        rows.append(k.shape[1])
        qh, kh, vh = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
        return dense_attention(0, qh, kh, vh).flatten(2)

    model = with_option(parts[0], optimized_attention_override=theirs)
    kept = sample(host, patch(host, model, **ALL)[0], parts[1], length=LENGTH)[0]
    assert max(rows) == 30 * 6, "self-attention over everything went through it"
    assert far(kept, sample(host, patch(host, parts[0], **ALL)[0], parts[1], length=LENGTH)[0]) <= SAME
    rows.clear()
    merged = sample(host, patch(host, model, **MERGING)[0], parts[1], length=LENGTH)[0]
    assert 7 in rows or 512 in rows, "text attention is still theirs"
    assert far(merged, sample(host, patch(host, parts[0], **MERGING)[0], parts[1], length=LENGTH)[0]) <= SAME


def test_heads_without_history_use_the_hosts_attention_with_their_own_number(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of the heads goes through the host's function, which splits its input by the number of heads it is told."""
    assert HEADS == 2
    quiet = PolicySettings("tempcache", sink_frames=1, tempcache=TempCacheSettings(budget_frames=12, threshold=1.01,
                                                                                           quiet_heads=((0, 1), (1, 0))))
    model, noise = small_model(), seeded_normal(1, (*NOISE[:2], 12, *NOISE[3:]))
    through = stream(model, noise, prompt(2), policy=quiet)
    plain = Attention.attend
    monkeypatch.setattr(Attention, "attend", lambda self, q, k, v, bias=None, **rest: plain(self, q, k, v, torch.zeros(1, 1, k.shape[1])
                                                                                          if bias is None else bias))
    assert far(through, stream(model, noise, prompt(2), policy=quiet)) <= SAME
