"""One row per checkpoint family: how its authors sample it. The rows are data (presets.json); the checks only warn.

The family of a file cannot be told from its weights, since all share one layout: the user chooses, name and metadata
hint.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path, PurePath
from typing import Any

from .checkpoint_shapes import ModelShape
from .errors import ConfigError
from .geometry import pixel_frames_for
from .sigmas import SigmaSchedule, nearest_in_table, warped_steps
from .solvers import teacher_schedule

AUTO = "auto"
LOOPS = ("blockwise", "rolling")
SOLVERS = ("renoise", "unipc")
POSITIONS = ("absolute", "slot", "anchor")
PREFIX_RULES = ("blocks", "one", "none")
METADATA_KEY = "fastar_preset"
# stages of training that are published beside the finished models, other generations: only a hint that says it may match
_NO_HINT = ("ar diffusion", "causal ode", "causal cd", "ode init", "longlive 2", "longlive2", "lora", "bidirectional")


@dataclass(frozen=True)
class Preset:
    """How one family is sampled. All frame counts are latent frames.

    raw_steps: 1000 = pure noise; read through the warp of `shift` unless `warped` is false. num_steps: instead of a
    list, for solver "unipc". window_frames: most frames attended, sink and own block included, None = everything.
    recache_frames: frames recomputed at a prompt switch. rollout_frames, context_frames: the timeline starts over from
    so many clean frames when it is so long; with clean_pass false the context is recomputed before every block.
    prefix_rule: "blocks" = start frames in whole blocks, "one" = a single start latent, "none" = no start frames.
    widths: model widths of the published files. loop: how blocks follow each other; available: this version has it.
    use_ema: which of two sets of weights the authors sample with. fps, width, height: defaults for new videos. limits:
    what is known not to work, in words.
    """

    key: str
    label: str
    family: str
    loop: str
    available: bool
    block: int
    raw_steps: tuple[int, ...]
    shift: float
    positions: str
    prefix_rule: str
    notes: str
    limits: str
    raw_steps_first_block: tuple[int, ...] | None = None
    warped: bool = True
    window_frames: int | None = None
    sink_frames: int = 0
    recache_frames: int | None = None
    rollout_frames: int | None = None
    context_frames: int | None = None
    clean_pass: bool = True
    solver: str = "renoise"
    num_steps: int = 0
    cfg: float = 1.0
    fps: float = 16.0
    max_frames_trained: int | None = None
    width: int = 832
    height: int = 480
    widths: tuple[int, ...] = ()
    use_ema: bool = True
    name_hints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        allowed = (("loop", LOOPS), ("solver", SOLVERS), ("positions", POSITIONS), ("prefix_rule", PREFIX_RULES))
        for name, values in allowed:
            if getattr(self, name) not in values:
                raise ConfigError(
                    f"preset '{self.key}': {name} is '{getattr(self, name)}', expected one of {', '.join(values)}"
                )
        listed = bool(self.raw_steps) if self.solver == "renoise" else self.num_steps > 0
        if self.block < 1 or not listed or self.shift <= 0:
            raise ConfigError(f"preset '{self.key}': block, raw_steps (num_steps for unipc) and shift must be there and positive")
        if (self.rollout_frames is None) != (self.context_frames is None) or not (self.clean_pass or self.context_frames):
            raise ConfigError(f"preset '{self.key}': rollout_frames and context_frames belong together, and a family without a "
                              "clean pass needs them")

    def __deepcopy__(self, memo: dict[int, Any]) -> Preset:
        return self


@functools.cache
def _table() -> dict[str, Preset]:
    rows = json.loads(Path(__file__).with_name("presets.json").read_text(encoding="utf-8"))
    return {key: _preset(key, row) for key, row in rows.items()}


def _preset(key: str, row: Mapping[str, Any]) -> Preset:
    unknown = sorted(set(row) - {field.name for field in fields(Preset)})
    if unknown:
        raise ConfigError(f"preset '{key}' has unknown entries: {', '.join(unknown)}; correct presets.json")
    try:
        values: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in row.items()}
        return Preset(key=key, **values)
    except TypeError as reason:
        raise ConfigError(f"preset '{key}' is incomplete: {reason}; correct presets.json") from reason


def preset_keys(available_only: bool = True) -> tuple[str, ...]:
    """Keys in table order; by default only those that this version can sample."""
    return tuple(key for key, preset in _table().items() if preset.available or not available_only)


def get_preset(key: str) -> Preset:
    """The row of that key, available or not. Raises ConfigError naming the keys there are."""
    try:
        return _table()[key]
    except KeyError:
        raise ConfigError(f"there is no preset '{key}'; choose one of {', '.join(preset_keys())}") from None


def schedule(preset: Preset) -> SigmaSchedule:
    """Sigmas of the preset from the float32 training table; un-warped lists also keep the raw numbers as timesteps."""
    if preset.solver == "unipc":
        return teacher_schedule(preset.num_steps, preset.shift)
    first = preset.raw_steps_first_block
    if preset.warped:
        sigmas, timesteps = warped_steps(preset.raw_steps, preset.shift)
        return SigmaSchedule(sigmas, warped_steps(first, preset.shift)[0] if first else None, timesteps)
    return SigmaSchedule(
        tuple(nearest_in_table(step, preset.shift) for step in preset.raw_steps),
        tuple(nearest_in_table(step, preset.shift) for step in first) if first else None,
        tuple(map(float, preset.raw_steps)),
        tuple(map(float, first)) if first else None,
    )


def hint_from_name(filename: str, metadata: Mapping[str, str] | None = None) -> str | None:
    """Key of the preset that the metadata or the name (folders included) speak of; None when they say nothing clear."""
    told = (metadata or {}).get(METADATA_KEY)
    if told in _table():
        return told
    words = " " + " ".join(re.findall(r"[a-z0-9]+", filename.replace("\\", "/").lower())) + " "
    telling = [part for part in _NO_HINT if f" {part} " in words]
    best: tuple[int, str] | None = None
    for key, preset in _table().items():
        for hint in preset.name_hints:
            score, told_all = len(hint), all(part in hint for part in telling)
            if told_all and all(f" {word} " in words for word in hint.split()) and (best is None or score > best[0]):
                best = (score, key)
    return best[1] if best else None


def resolve_preset(choice: str, filename: str, metadata: Mapping[str, str] | None = None) -> tuple[Preset, list[str]]:
    """The preset that the user chose, or for "auto" the one hinted at, with warnings where choice and hint disagree.

    Raises ConfigError when "auto" finds no hint, or one whose sampling loop this version lacks.
    """
    hint, name = hint_from_name(filename, metadata), PurePath(filename.replace("\\", "/")).name
    if choice != AUTO:
        preset = get_preset(choice)
        text = (
            f"the preset is '{preset.key}', but name or metadata of {name} speak of '{hint}'; a wrong preset gives "
            "plausible but worse video"
        )
        return preset, [text] if hint not in (None, preset.key) else []
    if hint is None:
        raise ConfigError(f"neither name nor metadata of {name} say which family it is; choose preset: "
                          f"{', '.join(preset_keys())}")  # fmt: skip
    preset = get_preset(hint)
    if not preset.available:
        raise ConfigError(f"{name} is a file for {preset.label}, which this version cannot sample yet; choose "
                          "another file, or a preset by hand to try it as that")  # fmt: skip
    return preset, []


def check_block(preset: Preset, block: int) -> list[str]:
    """Warnings about a block size (latent frames) other than the family's."""
    if block == preset.block:
        return []
    return [(
        f"block {block}: {preset.label} was trained with blocks of {preset.block} latent frames, others look "
        f"much worse; set block to {preset.block} or choose the checkpoint made for {block}"
    )]  # fmt: skip


def check_length(preset: Preset, latent_frames: int) -> list[str]:
    """Warnings about more latent frames than the family was trained on."""
    limit = preset.max_frames_trained
    if limit is None or latent_frames <= limit or preset.rollout_frames:
        return []
    cure = "" if preset.window_frames else "; a window of 9 to 12 latent frames with sink 3 keeps it in check"
    return [(
        f"{latent_frames} latent frames: {preset.label} was trained on {limit} ({pixel_frames_for(limit)} pixel "
        f"frames), beyond that colours and contrast may drift{cure}"
    )]  # fmt: skip


def check_window(preset: Preset, window_frames: int | None, sink_frames: int, block: int, own: int | None = None) -> list[str]:
    """Warnings about a cache window (latent frames, sink and own frames included) that is too small to be of use.

    own: latent frames of one denoise call, where that is more than a block (a rolling window).
    """
    if window_frames is None:
        return []
    own = own or block
    name = "the own block" if own == block else "the rolling window"
    warnings = []
    if window_frames < sink_frames + own:
        warnings.append(f"window {window_frames} is smaller than sink {sink_frames} + {name} {own}: no room for any "
                        f"history; set the window to {sink_frames + own + block} or more")  # fmt: skip
    elif window_frames < sink_frames + own + block:
        warnings.append(f"window {window_frames} does not hold one whole block of recent history beside sink "
                        f"{sink_frames} and {name} {own}; {sink_frames + own + block} or more keeps motion "
                        "smooth")  # fmt: skip
    if preset.window_frames is not None and window_frames > preset.window_frames:
        warnings.append(f"window {window_frames} is wider than the {preset.window_frames} latent frames of "
                        f"{preset.label}; history beyond that was not trained")  # fmt: skip
    return warnings


def check_cfg(preset: Preset, cfg: float) -> list[str]:
    """Warnings about a cfg that the family was not made for."""
    if preset.cfg == 1.0 and cfg != 1.0:
        return [f"cfg {cfg:g}: {preset.label} is distilled and runs without it; set cfg to 1 (half the time)"]
    if preset.cfg != 1.0 and cfg == 1.0:
        return [f"cfg 1: {preset.label} needs guidance; set cfg to {preset.cfg:g} and connect a negative prompt"]
    return []


def check_prefix(preset: Preset, prefix_frames: int) -> list[str]:
    """Warnings about start frames (latent frames, 0 = none) that the family was not made for."""
    if prefix_frames == 0:
        return []
    if preset.prefix_rule == "none":
        return [f"{preset.label} was not made to continue start frames; the first blocks may look wrong"]
    if preset.prefix_rule == "one" and prefix_frames != 1:
        return [f"{prefix_frames} start latent frames: {preset.label} was trained with a single one"]
    if preset.prefix_rule == "blocks" and prefix_frames % preset.block:
        return [(
            f"{prefix_frames} start latent frames: {preset.label} was trained with whole blocks of "
            f"{preset.block}; give {4 * preset.block - 3} start images or choose a framewise checkpoint"
        )]  # fmt: skip
    return []


def check_model(preset: Preset, shape: ModelShape) -> list[str]:
    """Warnings about a model whose sizes are not those of the family's published files."""
    warnings = []
    if not preset.available:
        warnings.append(f"this version has no sampling loop for {preset.label} yet")
    if preset.widths and shape.dim not in preset.widths:
        warnings.append(f"the model's width is {shape.dim}, files of {preset.label} have "
                        f"{' or '.join(map(str, preset.widths))}; check that the preset is the right one")  # fmt: skip
    if shape.image_input or shape.in_channels != shape.out_channels:
        warnings.append("the model has image-to-video inputs; the streaming families are text-to-video models, so "
                        "this is probably not a causal checkpoint")  # fmt: skip
    return warnings
