"""The preset table: schedules equal the frozen reference runs, names hint at the right row, checks warn rightly."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fastar_pack.fastar_core import presets
from fastar_pack.fastar_core.checkpoint_shapes import ModelShape
from fastar_pack.fastar_core.errors import ConfigError
from fastar_pack.fastar_core.presets import (
    Preset,
    check_block,
    check_cfg,
    check_length,
    check_model,
    check_prefix,
    check_window,
    get_preset,
    hint_from_name,
    preset_keys,
    resolve_preset,
    schedule,
)  # fmt: skip
from tiny.golden import load_golden

pytestmark = pytest.mark.cpu
SELF, RF, LONG = get_preset("self_forcing"), get_preset("rolling_forcing"), get_preset("longlive1")
FRAMEWISE = get_preset("causal_forcing_framewise_2step")


@pytest.mark.parametrize(("key", "golden"), [
    ("self_forcing", "A1"), ("causal_forcing_framewise_2step", "A3"), ("rolling_forcing", "A4"), ("longlive1", "A5"),
    ("causal_forcing_chunkwise", "A6"), ("demo", "A6"),
])  # fmt: skip
def test_schedules_equal_the_reference_runs_to_the_last_bit(key: str, golden: str) -> None:
    recorded, preset = load_golden(golden), get_preset(key)
    wanted, got = recorded.schedule, schedule(preset)
    assert got.sigmas == wanted.sigmas
    assert got.first_block == wanted.first_block
    for block in (0, 1):
        told = [torch.tensor(t, dtype=torch.float32) for _, t in got.for_block(block)]
        assert told == [torch.tensor(t, dtype=torch.float32) for _, t in wanted.for_block(block)]
    assert (preset.block, preset.shift) == (recorded.meta["block"], recorded.meta["shift"])
    wrong = schedule(replace(preset, shift=8.0))
    assert wrong.sigmas != wanted.sigmas


def test_unwarped_lists_read_the_nearest_entry_and_keep_their_timesteps() -> None:
    got = schedule(get_preset("causvid"))
    assert got.sigmas == pytest.approx((1.0, 0.7568, 0.5217), abs=1e-4)
    assert got.timesteps == (1000.0, 757.0, 522.0)
    warped = schedule(replace(get_preset("causvid"), warped=True))
    assert warped.sigmas[1] == pytest.approx(0.9614, abs=1e-4)
    assert warped.timesteps is None


def test_a_last_step_of_0_is_told_as_such_with_the_sigma_of_the_last_table_entry() -> None:
    got = schedule(get_preset("krea"))
    assert got.timesteps == pytest.approx((1000.0, 937.5, 833.333, 625.0, 0.0), abs=1e-3)
    assert got.sigmas[:4] == schedule(SELF).sigmas
    assert got.sigmas[4] == pytest.approx(0.00498, abs=5e-6)
    with pytest.raises(ConfigError, match="raw step 0"):
        schedule(replace(get_preset("krea"), raw_steps=(1000, 0, 250)))


def test_teachers_take_evenly_spaced_steps() -> None:
    for key in ("self_forcing_teacher", "causal_forcing_teacher"):
        row = get_preset(key)
        assert (row.solver, row.num_steps, row.cfg, len(schedule(row).sigmas)) == ("unipc", 50, 3.0, 50)
        assert schedule(row).timesteps[:2] == (999.0, 995.0)  # type: ignore[index]


def test_the_table_holds_every_family_and_offers_them() -> None:
    assert preset_keys() == preset_keys(available_only=False) == (
        "self_forcing", "self_forcing_teacher", "causal_forcing_chunkwise", "causal_forcing_framewise_4step",
        "causal_forcing_framewise_2step", "causal_forcing_framewise_1step", "causal_forcing_teacher", "causal_forcing_longvideo",
        "rolling_forcing", "longlive1", "longlive1_infinity", "causvid", "krea", "demo")


@pytest.mark.parametrize(("key", "raw", "first", "block", "ema"), [
    ("self_forcing", (1000, 750, 500, 250), None, 3, True),
    ("causal_forcing_chunkwise", (1000, 750, 500, 250), None, 3, False),
    ("causal_forcing_framewise_4step", (1000, 750, 500, 250), None, 1, True),
    ("causal_forcing_framewise_2step", (1000, 500), (1000, 750, 500, 250), 1, True),
    ("causal_forcing_framewise_1step", (1000,), (1000, 750, 500, 250), 1, True),
    ("demo", (1000, 750, 500, 250), None, 3, True),
])  # fmt: skip
def test_rows(key: str, raw: tuple[int, ...], first: tuple[int, ...] | None, block: int, ema: bool) -> None:
    row = get_preset(key)
    assert (row.raw_steps, row.raw_steps_first_block, row.block, row.use_ema) == (raw, first, block, ema)
    assert (row.shift, row.warped, row.cfg, row.fps) == (5.0, True, 1.0, 16.0)
    assert (row.window_frames, row.sink_frames) == (None, 0)
    assert row.positions == "absolute"
    assert row.clean_pass


def test_rows_of_other_loops() -> None:
    long_video, infinity = get_preset("causal_forcing_longvideo"), get_preset("longlive1_infinity")
    assert (RF.raw_steps, RF.window_frames, RF.sink_frames) == ((1000, 800, 600, 400, 200), 21, 3)
    assert (RF.loop, RF.positions, RF.max_frames_trained) == ("rolling", "anchor", 27)
    assert (long_video.raw_steps, long_video.window_frames, long_video.loop) == ((1000, 750, 500, 250), 21, "rolling")
    assert (LONG.window_frames, LONG.sink_frames, LONG.recache_frames, LONG.use_ema, LONG.loop) == (12, 3, 12, False, "blockwise")
    assert infinity == replace(LONG, key=infinity.key, label=infinity.label, name_hints=infinity.name_hints, notes=infinity.notes,
                               limits=infinity.limits, positions="slot", max_frames_trained=None)
    krea, causvid = get_preset("krea"), get_preset("causvid")
    assert (krea.window_frames, krea.positions, krea.clean_pass) == (6, "slot", False)
    assert (krea.rollout_frames, krea.context_frames, krea.raw_steps) == (6, 3, (1000, 750, 500, 250, 0))
    assert (causvid.shift, causvid.warped, causvid.raw_steps) == (8.0, False, (1000, 757, 522))
    assert (causvid.window_frames, causvid.rollout_frames, causvid.context_frames) == (None, 21, 3)


@pytest.mark.parametrize(("name", "key"), [
    ("checkpoints/self_forcing_dmd.pt", "self_forcing"),
    ("self_forcing_sid.safetensors", "self_forcing"),
    ("self_forcing_dmd_14b.safetensors", "self_forcing"),
    ("Causal-Forcing/chunkwise/causal_forcing.pt", "causal_forcing_chunkwise"),
    ("Causal-Forcing\\framewise\\causal_forcing.pt", "causal_forcing_framewise_4step"),
    ("causal_forcing-framewise.safetensors", "causal_forcing_framewise_4step"),
    ("causal-forcing++/framewise-2step.pt", "causal_forcing_framewise_2step"),
    ("causal_forcing_framewise_1step.pt", "causal_forcing_framewise_1step"),
    ("framewise-1step.pt", "causal_forcing_framewise_1step"),
    ("Causal-Forcing/chunkwise/longvideo.pt", "causal_forcing_longvideo"),
    ("rolling_forcing_dmd.pt", "rolling_forcing"),
    ("LongLive-1.3B/models/longlive_base.pt", "longlive1"),
    ("CausVid/autoregressive_checkpoint/model.pt", "causvid"),
    ("krea-realtime-video-14b.safetensors", "krea"),
    ("Causal-Forcing/chunkwise/ar_diffusion.pt", "causal_forcing_teacher"),
    ("longlive_infinity.safetensors", "longlive1_infinity"),
    ("fastar_demo.safetensors", "demo"),
    ("causal_forcing.pt", None),
    ("Causal-Forcing/framewise/ar_diffusion.pt", None),
    ("CausVid/bidirectional_checkpoint1/model.pt", None),
    ("Self-Forcing/checkpoints/ode_init.pt", None),
    ("longlive_2_5b.safetensors", None),
    ("wan2.1_t2v_1.3B_bf16.safetensors", None),
    ("krea_image.safetensors", None),
])  # fmt: skip
def test_hints_from_published_names(name: str, key: str | None) -> None:
    assert hint_from_name(name) == key


def test_metadata_wins_over_the_name() -> None:
    assert hint_from_name("rolling_forcing.safetensors", {"fastar_preset": "demo"}) == "demo"
    assert hint_from_name("rolling_forcing.safetensors", {"fastar_preset": "nonsense"}) == "rolling_forcing"


def test_resolving_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_preset("auto", "self_forcing_dmd.pt") == (SELF, [])
    assert resolve_preset("self_forcing", "model.pt") == (SELF, [])
    preset, (warning,) = resolve_preset("self_forcing", "framewise-2step.pt")
    assert preset is SELF
    assert "speak of 'causal_forcing_framewise_2step'" in warning
    with pytest.raises(ConfigError, match=r"model\.pt say which family it is; choose preset: self_forcing, self_"):
        resolve_preset("auto", "model.pt")
    unavailable = {key: replace(get_preset(key), available=key != "rolling_forcing") for key in preset_keys(False)}
    monkeypatch.setattr(presets, "_table", lambda: unavailable)
    with pytest.raises(ConfigError, match=r"a file for Rolling-Forcing .* cannot sample yet"):
        resolve_preset("auto", "rolling_forcing_dmd.pt")
    with pytest.raises(ConfigError, match=r"there is no preset 'nope'; choose one of self_forcing"):
        get_preset("nope")


def test_block_and_length_checks() -> None:
    assert check_block(SELF, 3) == check_block(FRAMEWISE, 1) == []
    assert "set block to 3" in check_block(SELF, 1)[0]
    assert "set block to 1" in check_block(FRAMEWISE, 3)[0]
    assert check_length(SELF, 21) == check_length(get_preset("demo"), 5000) == []
    assert "trained on 21 (81 pixel frames)" in check_length(SELF, 22)[0]
    assert "a window of 9 to 12" in check_length(SELF, 22)[0]
    assert check_length(LONG, 240) == []
    assert "a window of 9" not in check_length(LONG, 241)[0]
    assert check_length(get_preset("causvid"), 300) == [], "every roll-out is as long as the trained video"


def test_cfg_checks() -> None:
    teacher = get_preset("self_forcing_teacher")
    assert check_cfg(SELF, 1.0) == check_cfg(teacher, 3.0) == check_cfg(teacher, 5.0) == []
    assert "set cfg to 1" in check_cfg(SELF, 3.0)[0]
    assert "set cfg to 3 and connect a negative" in check_cfg(teacher, 1.0)[0]


@pytest.mark.parametrize(("window", "sink", "block", "words"), [
    (None, 0, 3, None), (9, 0, 3, None), (12, 3, 3, None), (6, 0, 3, None), (2, 0, 1, None),
    (2, 0, 3, "window 2 is smaller than sink 0 + the own block 3"), (5, 3, 3, "window 5 is smaller than sink 3 + the own block 3"),
    (5, 0, 3, "does not hold one whole block of recent history"), (6, 3, 3, "9 or more keeps motion smooth"),
])  # fmt: skip
def test_window_checks(window: int | None, sink: int, block: int, words: str | None) -> None:
    warnings = check_window(SELF, window, sink, block)
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]
    assert "wider than the 12 latent frames" in check_window(LONG, 15, 3, 3)[0]
    assert check_window(RF, 21, 3, 3, own=15) == []
    assert "the rolling window 15; 21 or more" in check_window(RF, 18, 3, 3, own=15)[0]
    assert "sink 3 + the rolling window 15: no room" in check_window(RF, 17, 3, 3, own=15)[0]


def test_prefix_checks() -> None:
    assert check_prefix(SELF, 0) == check_prefix(SELF, 3) == check_prefix(SELF, 6) == check_prefix(FRAMEWISE, 1) == []
    assert "whole blocks of 3; give 9 start images" in check_prefix(SELF, 1)[0]
    assert "trained with a single one" in check_prefix(FRAMEWISE, 2)[0]
    assert "was not made to continue start frames" in check_prefix(RF, 3)[0]


def test_model_checks() -> None:
    shape = ModelShape(1536, 30, 12, 8960, 16, 16, 4096, False)
    assert check_model(SELF, shape) == []
    assert "width is 256, files of Self-Forcing" in check_model(SELF, replace(shape, dim=256))[0]
    assert check_model(SELF, replace(shape, dim=5120)) == []
    assert "image-to-video" in check_model(SELF, replace(shape, in_channels=36, image_input=True))[0]
    assert "no sampling loop" in check_model(replace(SELF, available=False), shape)[0]


@pytest.mark.parametrize(("change", "words"), [
    ({"blok": 3}, "unknown entries: blok"), ({"block": 0}, "must be there and positive"),
    ({"block": None}, "incomplete"),
    ({"loop": "other"}, "loop is 'other', expected one of blockwise"), ({"raw_steps": []}, "must be there"),
    ({"solver": "unipc"}, "num_steps for unipc"), ({"solver": "euler"}, "solver is 'euler'"),
    ({"rollout_frames": 6}, "belong together"), ({"clean_pass": False}, "without a clean pass needs them"),
])  # fmt: skip
def test_a_wrong_row_is_refused(change: dict[str, object], words: str) -> None:
    row = json.loads(Path(presets.__file__).with_name("presets.json").read_text(encoding="utf-8"))["self_forcing"]
    assert presets._preset("self_forcing", row) == SELF
    changed = {key: value for key, value in {**row, **change}.items() if value is not None}
    with pytest.raises(ConfigError, match=words):
        presets._preset("self_forcing", changed)


def test_rows_carry_what_a_user_reads() -> None:
    for key in preset_keys(available_only=False):
        row = get_preset(key)
        assert isinstance(row, Preset)
        assert min(len(row.label), len(row.notes), len(row.limits)) > 15
        assert row.name_hints
