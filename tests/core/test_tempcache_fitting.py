"""From the node's choices and the family to a run's settings: sink, re-index span, memory, recache, warnings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.tempcache_tools import Synthetic, tc
from fastar_pack.fastar_core.errors import ConfigError, MemoryPlanError
from fastar_pack.fastar_core.geometry import RunGeometry
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.presets import get_preset, schedule
from fastar_pack.fastar_core.run_choice import choose_policy, choose_run, run_warnings, unused_policy
from fastar_pack.fastar_core.settings import FastARSettings
from fastar_pack.fastar_core.stream_choice import Canvas, Choice, kept_in_words, planned_kv_bytes
from fastar_pack.fastar_core.tempcache.fitting import choose_settings, family_span, fit_family, fit_memory, plan_of
from fastar_pack.fastar_core.tempcache.plan import PRESETS, plan_tempcache
from fastar_pack.fastar_core.tempcache.settings import FAMILY_SINK, FAMILY_SPAN, TempCacheSettings

pytestmark = pytest.mark.cpu
GEOMETRY = RunGeometry(120, 3, 30, 52, 30)
MODEL = (12, 128, 2, 1)


def settings_of(policy: PolicySettings) -> TempCacheSettings:
    assert policy.tempcache is not None
    return policy.tempcache


def run_of(key: str, policy: PolicySettings, switch: str = "preset", switching: bool = False) -> Any:
    preset = get_preset(key)
    return choose_run(preset, policy, len(schedule(preset).sigmas), switch, switching)


@pytest.mark.parametrize(("key", "sink"), [("self_forcing", 1), ("longlive1", 3), ("rolling_forcing", 3), ("krea", 1), ("demo", 1)])
def test_the_sink_of_the_family_holds_but_never_less_than_one(key: str, sink: int) -> None:
    assert run_of(key, tc(sink=FAMILY_SINK)).policy.sink_frames == sink
    assert run_of(key, tc(sink=2)).policy.sink_frames == 2
    assert run_of(key, tc(sink=0)).policy.sink_frames == 0
    assert fit_family(tc(sink=FAMILY_SINK), None, 3).sink_frames == 1


@pytest.mark.parametrize(("key", "own", "span"), [
    ("self_forcing", 3, 18), ("causal_forcing_framewise_2step", 1, 20), ("rolling_forcing", 15, 12), ("longlive1", 3, 237),
    ("longlive1_infinity", 3, 9), ("krea", 3, 3), ("causal_forcing_longvideo", 12, 9), ("demo", 3, 18),
])
def test_re_indexing_ends_where_the_family_was_trained(key: str, own: int, span: int) -> None:
    assert family_span(get_preset(key), own) == span
    assert settings_of(run_of(key, tc(reindex_span=FAMILY_SPAN)).policy).reindex_span == span
    in_window = get_preset(key).positions == "slot"
    assert settings_of(run_of(key, tc()).policy).reindex_span == (span if in_window else None)
    assert settings_of(run_of(key, tc(reindex_span=7)).policy).reindex_span == 7
    assert family_span(None, 3) == 18


def test_other_policies_are_left_alone() -> None:
    for policy in (PolicySettings(), PolicySettings("sink_window", 9, 2), PolicySettings("rolling", 21, 3)):
        assert fit_family(policy, get_preset("krea"), 3) is policy
        assert fit_memory(policy, GEOMETRY, *MODEL, 1) is policy
        assert plan_of(policy, GEOMETRY, *MODEL) is None


def test_what_is_not_filled_in_is_refused() -> None:
    for settings in (tc(sink=FAMILY_SINK), tc(reindex_span=FAMILY_SPAN)):
        with pytest.raises(ConfigError, match="must be filled in"):
            Synthetic(settings).call("denoise", 0, 3)
    with pytest.raises(ConfigError, match="a budget of 6 latent frames holds no history beside 3 sink and 3 recent"):
        run_of("longlive1", tc(sink=FAMILY_SINK, budget_frames=6))
    with pytest.raises(ConfigError, match="reindex_span is -1"):
        TempCacheSettings(reindex_span=-1)


def test_a_memory_limit_only_lowers_the_budget() -> None:
    policy = tc(budget_frames=24)
    whole = plan_tempcache(settings_of(policy), 1, GEOMETRY, *MODEL).total_bytes
    limited = replace(policy, tempcache=replace(settings_of(policy), memory_gb=0.75 * whole / 1e9))
    fitted = fit_memory(limited, GEOMETRY, *MODEL, 10**15)
    assert 5 < settings_of(fitted).budget_frames < 24
    held, more = (plan_tempcache(replace(settings_of(fitted), budget_frames=settings_of(fitted).budget_frames + i), 1, GEOMETRY,
                                 *MODEL).total_bytes for i in (0, 1))
    assert held <= 0.75 * whole < more
    assert planned_kv_bytes(fitted, GEOMETRY, 12 * 128, 2, 1, 12) == held
    auto = replace(policy, tempcache=replace(settings_of(policy), memory_gb=-1))
    assert settings_of(fit_memory(auto, GEOMETRY, *MODEL, int(0.75 * whole))).budget_frames == settings_of(fitted).budget_frames
    assert fit_memory(auto, GEOMETRY, *MODEL, 2 * whole) is auto
    assert fit_memory(policy, GEOMETRY, *MODEL, 1) is policy, "0 = no limit"
    with pytest.raises(MemoryPlanError, match="even a budget of 5 latent frames does not fit"):
        fit_memory(auto, GEOMETRY, *MODEL, 10**6)


def test_choices_stand_over_the_preset() -> None:
    base = PRESETS["quality"]
    assert choose_settings(base, 0, 0, -1, 0) == base
    assert choose_settings(base, 30, 2.5, 0, 0.25, space="pre", search=None) == replace(
        base, budget_frames=30.0, memory_gb=2.5, recent_frames=0, threshold=0.25, floor=min(base.floor, 0.25), space="pre")
    assert choose_settings(base, 0, -1, -1, 0).memory_gb == -1
    with pytest.raises(ConfigError, match=r"memory_gb is -2; set it to 0 \(no limit\), -1"):
        choose_settings(base, 0, -2, -1, 0)
    with pytest.raises(ConfigError, match="search is 'faiss'"):
        choose_settings(base, 0, 0, -1, 0, search="faiss")


@pytest.mark.parametrize(("key", "switch", "recent", "frames"), [
    ("longlive1", "preset", 3, 3), ("longlive1", "keep", 6, 6), ("longlive1", "keep", 20, 12), ("longlive1", "keep", 0, None),
    ("longlive1", "drop", 3, 12), ("self_forcing", "keep", 3, 3), ("self_forcing", "preset", 3, None),
])
def test_a_prompt_switch_recomputes_what_can_be_rewritten(key: str, switch: str, recent: int, frames: int | None) -> None:
    run = run_of(key, tc(budget_frames=40, recent_frames=recent), switch, switching=True)
    assert run.recache_frames == frames
    assert run.call_frames == max(3, frames or 0)


def test_words_and_warnings() -> None:
    merged = tc(budget_frames=21)
    assert kept_in_words(merged) == "everything, merged into 21 latent frames (sink 1, recent 3)"
    assert kept_in_words(PolicySettings()) == "everything"
    assert kept_in_words(PolicySettings("sink_window", 9, 2)) == "9 latent frames (sink 2)"
    preset = get_preset("self_forcing")
    assert "trained on 21" in run_warnings(preset, run_of("self_forcing", merged), 60, 0)[0]
    assert run_warnings(preset, run_of("self_forcing", tc(budget_frames=21, reindex_span=FAMILY_SPAN)), 60, 0) == []
    model = FastARSettings(policy=merged)
    assert choose_policy("full", 9, 3, preset, model) == PolicySettings()
    told = "the model carries the cache 'tempcache' of another node, which is not used: cache is 'full', not 'preset'"
    assert unused_policy("full", model) == [told]
    assert unused_policy("preset", model) == unused_policy("full", None) == unused_policy("full", FastARSettings()) == []
    report = Choice(preset, run_of("self_forcing", merged), Canvas(64, 64, 81), 16, 0, 1.0).as_report()["cache"]
    assert isinstance(report, dict)
    assert report["tempcache"]["budget_frames"] == 21
    assert report["keeps"] == kept_in_words(merged)
