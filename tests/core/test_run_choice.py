"""From preset and choices to loop, cache rule, recache, restart, solver and longest call."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastar_pack.fastar_core.drivers import Restart
from fastar_pack.fastar_core.errors import ConfigError
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.presets import get_preset, preset_keys, schedule
from fastar_pack.fastar_core.run_choice import (
    RunChoice,
    choose_policy,
    choose_run,
    fit_policy,
    preset_policy,
    preset_restart,
    run_warnings,
)
from fastar_pack.fastar_core.settings import FastARSettings
from fastar_pack.fastar_core.stream_choice import Canvas, Choice, choose_preset, given_schedule, planned_kv_bytes
from fastar_pack.fastar_core.tempcache.settings import TempCacheSettings

pytestmark = pytest.mark.cpu
RF, LONG, SELF = get_preset("rolling_forcing"), get_preset("longlive1"), get_preset("self_forcing")
KREA, CAUSVID = get_preset("krea"), get_preset("causvid")
FULL = PolicySettings()
WINDOW = PolicySettings("sink_window", 9, 2)
ROLLING = PolicySettings("rolling", 21, 3)
TEMP = PolicySettings("tempcache", sink_frames=3, tempcache=TempCacheSettings())


def run_of(key: str, policy: PolicySettings | None = None, switch: str = "preset", switching: bool = False) -> RunChoice:
    preset = get_preset(key)
    return choose_run(preset, policy or preset_policy(preset), len(schedule(preset).sigmas), switch, switching)


@pytest.mark.parametrize(("key", "loop", "policy", "call_frames", "restart", "solver"), [
    ("self_forcing", "blockwise", FULL, 3, None, "renoise"),
    ("self_forcing_teacher", "blockwise", FULL, 3, None, "unipc"),
    ("causal_forcing_teacher", "blockwise", FULL, 3, None, "unipc"),
    ("causal_forcing_framewise_2step", "blockwise", FULL, 1, None, "renoise"),
    ("rolling_forcing", "rolling", ROLLING, 15, None, "renoise"),
    ("causal_forcing_longvideo", "rolling", ROLLING, 12, None, "renoise"),
    ("longlive1", "blockwise", PolicySettings("sink_window", 12, 3), 3, None, "renoise"),
    ("longlive1_infinity", "blockwise", PolicySettings("sink_window", 12, 3, "slot"), 3, None, "renoise"),
    ("causvid", "blockwise", FULL, 3, Restart(21, 3, 9), "renoise"),
    ("krea", "blockwise", PolicySettings("sink_window", 6, 0, "slot"), 3, Restart(6, 3, 9), "renoise"),
    ("demo", "blockwise", FULL, 3, None, "renoise"),
])
def test_runs_of_the_families(key: str, loop: str, policy: PolicySettings, call_frames: int, restart: Restart | None,
                              solver: str) -> None:
    run = run_of(key)
    assert (run.loop, run.policy, run.call_frames, run.restart, run.solver) == (loop, policy, call_frames, restart, solver)
    assert (run.block, run.recache_frames, run.rebuild, run.warnings) == (get_preset(key).block, None, False, [])


def test_every_preset_runs() -> None:
    for key in preset_keys():
        run = run_of(key, switching=True)
        assert run.call_frames >= run.block >= 1


@pytest.mark.parametrize(("key", "cache", "want"), [
    ("rolling_forcing", "preset", ROLLING), ("rolling_forcing", "full", PolicySettings("rolling", None, 3)),
    ("rolling_forcing", "sink_window", PolicySettings("rolling", 30, 6)),
    ("self_forcing", "full", FULL), ("self_forcing", "sink_window", PolicySettings("sink_window", 30, 6)),
    ("longlive1", "full", FULL), ("longlive1_infinity", "full", PolicySettings(positions="slot")),
    ("longlive1_infinity", "sink_window", PolicySettings("sink_window", 30, 6, "slot")),
])
def test_cache_choices(key: str, cache: str, want: PolicySettings) -> None:
    assert choose_policy(cache, 30, 6, get_preset(key), None) == want


@pytest.mark.parametrize(("own", "preset", "want"), [
    (TEMP, RF, TEMP), (TEMP, LONG, TEMP), (FULL, RF, PolicySettings("rolling", None, 3)),
    (WINDOW, RF, PolicySettings("rolling", 9, 2)), (ROLLING, RF, ROLLING), (WINDOW, SELF, WINDOW),
    (ROLLING, SELF, PolicySettings("sink_window", 21, 3)), (PolicySettings("rolling", None, 3), SELF, PolicySettings("full", None, 3)),
])
def test_a_policy_on_the_model_is_fitted_to_the_loop(own: PolicySettings, preset: object, want: PolicySettings) -> None:
    assert fit_policy(own, preset) == want  # type: ignore[arg-type]
    assert choose_policy("preset", 0, 0, preset, FastARSettings(policy=own)) == want  # type: ignore[arg-type]
    assert choose_policy("preset", 0, 0, preset, FastARSettings()) == preset_policy(preset)  # type: ignore[arg-type]


@pytest.mark.parametrize(("key", "policy", "switch", "recache", "rebuild", "rule"), [
    ("longlive1", None, "preset", 12, False, "keep"), ("longlive1", None, "drop", 12, False, "drop"),
    ("longlive1", None, "none", None, False, "keep"), ("longlive1", None, "rebuild", None, True, "rebuild"),
    ("longlive1", PolicySettings("sink_window", 6, 3), "preset", 6, False, "keep"),
    ("longlive1", FULL, "preset", 12, False, "keep"), ("longlive1", TEMP, "drop", 12, False, "drop"),
    ("longlive1", replace(TEMP, recache="rebuild"), "preset", None, True, "rebuild"),
    ("longlive1", replace(TEMP, recache="rebuild"), "keep", 3, False, "keep"),  # the recent range: groups stay as they are
    ("self_forcing", None, "preset", None, False, "keep"), ("self_forcing", None, "keep", 12, False, "keep"),
    ("self_forcing", replace(TEMP, recache="drop"), "preset", 12, False, "drop"),
    ("krea", None, "rebuild", None, True, "rebuild"), ("causvid", None, "none", None, False, "keep"),
])
def test_prompt_switches(key: str, policy: PolicySettings | None, switch: str, recache: int | None, rebuild: bool, rule: str) -> None:
    run = run_of(key, policy, switch, switching=True)
    assert (run.recache_frames, run.rebuild, run.policy.recache, run.warnings) == (recache, rebuild, rule, [])
    assert run.call_frames == max(run.block, recache or 0)
    quiet = run_of(key, policy, switch)
    assert (quiet.recache_frames, quiet.rebuild, quiet.call_frames, quiet.warnings) == (None, False, run.block, [])


def test_switches_that_a_family_cannot_make_are_said() -> None:
    run = run_of("rolling_forcing", None, "keep", switching=True)
    assert (run.recache_frames, run.call_frames) == (None, 15)
    assert "from the first window" in run.warnings[0]
    assert "recomputes its context at every restart" in run_of("krea", None, "keep", switching=True).warnings[0]
    with pytest.raises(ConfigError, match="prompt_switch is 'often', expected one of preset, keep"):
        run_of("longlive1", None, "often")


def test_a_window_too_small_for_the_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise window to 6"):
        choose_policy("sink_window", 5, 3, RF, None)
    with pytest.raises(ConfigError, match="cache is 'half'"):
        choose_policy("half", 5, 3, RF, None)


def test_sizes_of_a_restarting_timeline_are_those_of_one_roll_out() -> None:
    canvas = Canvas(64, 64, 4 * 60 + 1)
    assert canvas.geometry(run_of("self_forcing"), 2).total_frames == 61
    assert canvas.geometry(run_of("causvid"), 2).total_frames == 21
    assert canvas.geometry(run_of("krea"), 2).total_frames == 6
    assert Canvas(64, 64, 9).geometry(run_of("causvid"), 2).total_frames == 3
    assert Canvas(64, 64, 4 * 60 + 1, prefix_frames=30).geometry(run_of("causvid"), 2).total_frames == 30
    assert canvas.geometry(run_of("rolling_forcing"), 2).call_frames == 15
    assert Canvas(64, 64, 9).geometry(run_of("rolling_forcing"), 2).call_frames == 3


def test_planned_bytes_of_a_rolling_cache_are_true() -> None:
    """24 stored frames and the undo of one block; the extended history keeps everything."""
    canvas = Canvas(64, 64, 4 * 60 + 1)
    geometry = canvas.geometry(run_of("rolling_forcing"), 2)
    frame = planned_kv_bytes(FULL, geometry, 128, 4, 1) // 61
    assert planned_kv_bytes(ROLLING, geometry, 128, 4, 1) == 27 * frame
    assert planned_kv_bytes(replace(ROLLING, window_frames=None), geometry, 128, 4, 1) == 61 * frame


def test_anchors_are_needed_only_past_the_first_roll_out() -> None:
    krea, causvid = run_of("krea"), run_of("causvid")
    assert [krea.needs_anchor(frames) for frames in (6, 7)] == [False, True]
    assert [causvid.needs_anchor(frames) for frames in (21, 22)] == [False, True]
    assert not run_of("self_forcing").needs_anchor(1000)
    kept = preset_restart(KREA)
    assert kept is not None
    assert not replace(krea, restart=replace(kept, keep_first=True)).needs_anchor(99)


def test_warnings_of_a_run() -> None:
    assert run_warnings(RF, run_of("rolling_forcing"), 126, 0) == []
    extended = choose_policy("full", 0, 0, RF, None)
    assert "trained on 27" in run_warnings(RF, run_of("rolling_forcing", extended), 126, 0)[0]
    small = choose_policy("sink_window", 12, 3, RF, None)
    assert "smaller than sink 3 + the rolling window 15" in run_warnings(RF, run_of("rolling_forcing", small), 126, 0)[0]
    assert run_warnings(CAUSVID, run_of("causvid"), 126, 0) == []
    assert "was not made to continue start frames" in run_warnings(RF, run_of("rolling_forcing"), 21, 3)[0]
    choice = Choice(SELF, run_of("self_forcing"), Canvas(64, 64, 81), 16, 0, 3.0)
    assert "runs without it" in choice.warnings[0]


def test_wrong_family_and_wrong_block_are_said() -> None:
    loaded = FastARSettings(preset=get_preset("causal_forcing_framewise_2step"))
    preset, warnings = choose_preset("self_forcing", loaded)
    assert preset is SELF
    assert "loaded as 'causal_forcing_framewise_2step'" in warnings[0]
    assert "set block to 1" in warnings[1]
    assert len(choose_preset("causal_forcing_framewise_1step", loaded)[1]) == 1
    assert choose_preset("auto", loaded) == (loaded.preset, [])


def test_sigmas_of_the_family_keep_its_timesteps() -> None:
    """Krea tells its last step as 0, CausVid its raw numbers: given the same sigmas, a SAMPLER does too."""
    for preset in (KREA, CAUSVID, SELF, RF):
        own = schedule(preset)
        assert given_schedule([*own.sigmas, 0.0], preset) == own
        other = given_schedule([1.0, 0.4, 0.0], preset)
        assert (other.sigmas, other.timesteps) == ((1.0, 0.4), None)
