"""Choices of the samplers: preset and cache precedence, frame counts, noise, schedules, planned bytes, time split."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from fastar_pack.fastar_core.clock import Clock
from fastar_pack.fastar_core.errors import ConfigError, GeometryError
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.presets import get_preset, preset_keys, schedule
from fastar_pack.fastar_core.run_choice import choose_policy, choose_run
from fastar_pack.fastar_core.settings import FastARSettings
from fastar_pack.fastar_core.stream_choice import (
    Canvas,
    Choice,
    choose_preset,
    given_schedule,
    goes_to_file,
    largest_window,
    planned_kv_bytes,
    unused_prompts,
)

pytestmark = pytest.mark.cpu
SELF = get_preset("self_forcing")
TWO_STEP = get_preset("causal_forcing_framewise_2step")


def test_auto_takes_the_preset_of_the_model_and_a_choice_wins() -> None:
    assert choose_preset("auto", FastARSettings(TWO_STEP)) == (TWO_STEP, [])
    chosen, warnings = choose_preset("self_forcing", FastARSettings(TWO_STEP))
    assert chosen is SELF
    assert "the model was loaded as .causal_forcing_framewise_2step" in warnings[0].replace("'", ".")
    assert choose_preset("self_forcing", FastARSettings(SELF))[1] == []
    assert choose_preset("self_forcing", None)[1] == []
    for settings in (None, FastARSettings()):
        with pytest.raises(ConfigError, match=r"choose preset: self_forcing"):
            choose_preset("auto", settings)
    with pytest.raises(ConfigError, match="no sampling loop"):
        choose_preset("auto", FastARSettings(replace(SELF, available=False)))


def test_cache_precedence() -> None:
    patched = FastARSettings(SELF, PolicySettings("sink_window", 15, 6))
    assert choose_policy("preset", 9, 3, SELF, None) == PolicySettings()
    assert choose_policy("preset", 9, 3, SELF, patched) == patched.policy
    assert choose_policy("full", 9, 3, SELF, patched) == PolicySettings()
    assert choose_policy("sink_window", 9, 3, SELF, patched) == PolicySettings("sink_window", 9, 3)
    windowed = replace(SELF, window_frames=12, sink_frames=3)
    assert choose_policy("preset", 9, 0, windowed, None) == PolicySettings("sink_window", 12, 3)
    with pytest.raises(ConfigError, match="raise window to 6"):
        choose_policy("sink_window", 5, 3, SELF, None)


@pytest.mark.parametrize(("choice", "length", "file"), [
    ("auto", 129, False), ("auto", 130, True), ("memory", 10**5, False), ("file", 1, True),
])
def test_where_frames_go(choice: str, length: int, file: bool) -> None:
    assert goes_to_file(choice, length) is file


@pytest.mark.parametrize(("length", "latents"), [(1, 1), (4, 2), (5, 2), (143, 37), (144, 37), (145, 37), (146, 38)])
def test_enough_latent_frames_for_every_length(length: int, latents: int) -> None:
    canvas = Canvas(64, 32, length)
    assert canvas.latent_shape == (1, 16, latents, 4, 8)
    assert length <= canvas.computed_frames < length + 4


def test_the_canvas_refuses_what_cannot_be() -> None:
    with pytest.raises(GeometryError, match="set width to 832"):
        Canvas(830, 480, 81)
    with pytest.raises(GeometryError, match="above 9"):
        Canvas(64, 32, 9, prefix_frames=3)
    assert Canvas(64, 32, 10, prefix_frames=3).latent_frames == 4


def test_given_sigmas_keep_the_first_block_list_of_the_preset() -> None:
    own = schedule(TWO_STEP)
    given = given_schedule([1.0, 0.5, 0.0], TWO_STEP)
    assert (given.sigmas, given.first_block) == ((1.0, 0.5), own.first_block)
    assert given_schedule([1.0, 0.5, 0.0], SELF).first_block is None
    for wrong in ([1.0, 0.5], [0.0], [], [0.5, 1.0, 0.0]):
        with pytest.raises(ConfigError):
            given_schedule(wrong, SELF)


def test_planned_bytes_at_published_sizes() -> None:
    """A token of the 1.3B model (30 layers, width 1536, 2 bytes) takes 184,320 bytes, a 480p latent frame has 1,560."""
    geometry = Canvas(832, 480, 81).geometry(choose_run(SELF, PolicySettings(), 4), 30)
    assert (geometry.total_frames, geometry.block, geometry.rows, geometry.cols, geometry.num_layers) == (21, 3, 30, 52, 30)
    frame = 184_320 * 1_560
    window = PolicySettings("sink_window", 9, 3)
    assert planned_kv_bytes(PolicySettings(), geometry, 1536, 2, 1) == 21 * frame
    assert planned_kv_bytes(PolicySettings(), geometry, 1536, 2, 2) == 42 * frame
    assert planned_kv_bytes(window, geometry, 1536, 2, 1) == (9 + 3) * frame
    assert planned_kv_bytes(replace(window, window_frames=21), geometry, 1536, 2, 1) == 21 * frame
    assert largest_window(window, geometry, 1536, 2, 1, 12 * frame) == 9
    assert largest_window(window, geometry, 1536, 2, 1, 11 * frame) == 0


def test_warnings_name_what_was_not_trained() -> None:
    def warnings(policy: PolicySettings, length: int, prefix: int = 0) -> list[str]:
        run = choose_run(SELF, policy, 4)
        return Choice(SELF, run, Canvas(64, 32, length, prefix_frames=prefix), 16.0, 0, 1.0).warnings

    assert warnings(PolicySettings(), 81) == []
    assert "trained on 21" in warnings(PolicySettings(), 85)[0]
    assert warnings(PolicySettings("sink_window", 12, 3), 85) == []
    assert "whole blocks of 3" in warnings(PolicySettings(), 81, prefix=1)[0]


@pytest.mark.parametrize(("starts", "prefix", "lost"), [
    ([0], 0, None), ([0, 3, 6], 0, None), ([0, 1, 4], 1, None), ([0, 9], 0, "9"), ([0, 7, 8], 0, "7, 8"), ([0, 1, 3], 0, "1"),
    ([0, 2], 1, None),
])
def test_prompts_that_never_hold_are_named(starts: list[int], prefix: int, lost: str | None) -> None:
    found = unused_prompts(starts, Canvas(64, 32, 33, prefix_frames=prefix), 3)
    assert [text.split(" are ")[0] for text in found] == ([] if lost is None else [f"prompts that begin in latent frames {lost}"])


def test_every_preset_that_is_offered_can_be_chosen() -> None:
    for key in preset_keys():
        preset, _ = choose_preset(key, None)
        policy = choose_policy("preset", 9, 3, preset, None)
        assert policy.kind in ("full", "sink_window", "rolling")
        assert (policy.window_frames, policy.sink_frames) == (preset.window_frames, preset.sink_frames)


def test_nested_times_are_counted_once() -> None:
    clock = Clock()
    with clock.measure("sampling"):
        time.sleep(0.02)
        with clock.measure("vae"):
            time.sleep(0.05)
    split = clock.split()
    assert 0.05 <= split["vae"] < 0.5
    assert 0.02 <= split["sampling"] < split["total"] - 0.04
    assert split["total"] == pytest.approx(split["sampling"] + split["vae"] + split["other"], abs=0.01)
    assert torch.tensor(list(split.values())).min() >= 0
