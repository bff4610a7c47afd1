"""From what a user chose to what a run does: preset, cache policy, frame counts, start noise, planned cache bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch

from .errors import ConfigError, GeometryError
from .geometry import (
    PIXELS_PER_LATENT,
    RunGeometry,
    kv_bytes_per_frame,
    latent_frames_for,
    pixel_frames_for,
    plan_blocks,
    token_grid,
)
from .noise import seeded_normal
from .policies import PolicySettings
from .presets import AUTO, Preset, check_block, check_cfg, get_preset, preset_keys, schedule
from .run_choice import RunChoice, run_warnings
from .settings import FastARSettings
from .sigmas import SigmaSchedule
from .tempcache.fitting import plan_of

FRAMES_CHOICES = ("auto", "memory", "file")
FILE_ABOVE = 129
LATENT_CHANNELS = 16
SAME_SIGMA = 1e-6


def choose_preset(choice: str, settings: FastARSettings | None) -> tuple[Preset, list[str]]:
    """The preset of the run and warnings. "auto" takes the model's own; raises ConfigError when it has none."""
    own = settings.preset if settings is not None else None
    warnings: list[str] = []
    if choice == AUTO:
        if own is None:
            raise ConfigError("preset is 'auto', but this model does not say which family it is of; load it with "
                              f"FAST-AR Load Streaming Model or choose preset: {', '.join(preset_keys())}")
        chosen = own
    else:
        chosen = get_preset(choice)
        if own is not None and own.key != choice:
            warnings = [f"preset '{choice}' was chosen, the model was loaded as '{own.key}'; a wrong one gives worse video"]
            warnings += check_block(own, chosen.block)
    if not chosen.available:
        raise ConfigError(f"preset '{chosen.key}': this version has no sampling loop for {chosen.label}; choose one of "
                          f"{', '.join(preset_keys())}")
    return chosen, warnings


def goes_to_file(choice: str, length: int) -> bool:
    """True when frames go to a file: on request, or with "auto" above FILE_ABOVE pixel frames."""
    if choice not in FRAMES_CHOICES:
        raise ConfigError(f"frames_to is '{choice}', expected one of {', '.join(FRAMES_CHOICES)}")
    return choice == "file" or (choice == "auto" and length > FILE_ABOVE)


@dataclass(frozen=True)
class Canvas:
    """Sizes of a run: pixels, pixel frames to deliver, latent frames to compute, batch rows, clean prefix frames."""

    width: int
    height: int
    length: int
    batch: int = 1
    prefix_frames: int = 0

    def __post_init__(self) -> None:
        for name, value in (("width", self.width), ("height", self.height)):
            if value < PIXELS_PER_LATENT or value % PIXELS_PER_LATENT:
                near = max(1, round(value / PIXELS_PER_LATENT)) * PIXELS_PER_LATENT
                raise GeometryError(f"{name} is {value} pixels, expected a multiple of {PIXELS_PER_LATENT}; "
                                    f"set {name} to {near}")
        if self.batch < 1:
            raise GeometryError(f"batch_size is {self.batch}, at least 1 is needed")
        if self.prefix_frames >= self.latent_frames:
            raise GeometryError(f"the start frames fill {self.prefix_frames} of {self.latent_frames} latent frames and leave "
                                f"nothing to generate; raise length above {pixel_frames_for(self.prefix_frames)} or give "
                                "fewer start frames")

    @property
    def latent_frames(self) -> int:
        return latent_frames_for(self.length)

    @property
    def computed_frames(self) -> int:
        """Pixel frames that the computed latent frames decode to; at least ``length``."""
        return pixel_frames_for(self.latent_frames)

    @property
    def latent_shape(self) -> tuple[int, int, int, int, int]:
        """[B, 16, T, h, w]."""
        return (self.batch, LATENT_CHANNELS, self.latent_frames, self.height // PIXELS_PER_LATENT,
                self.width // PIXELS_PER_LATENT)

    @property
    def pixel_bytes(self) -> int:
        """Bytes of all frames as float32 RGB."""
        return self.batch * self.length * self.width * self.height * 3 * 4

    def geometry(self, run: RunChoice, num_layers: int) -> RunGeometry:
        """Sizes for the cache policy."""
        rows, cols = token_grid(*self.latent_shape[3:])
        return run.geometry(self.latent_frames, self.prefix_frames, rows, cols, num_layers)


def draw_noise(seed: int, shape: Sequence[int], prefix_frames: int, preset: Preset) -> torch.Tensor:
    """Start noise [B, C, T, h, w] of the whole length; the part under the prefix is never read.

    The reference sampler of Causal-Forcing draws only the frames it generates, all others draw the whole length.
    """
    if prefix_frames == 0 or preset.family != "causal_forcing":
        return seeded_normal(seed, shape)
    noise = torch.zeros(tuple(shape))
    noise[:, :, prefix_frames:] = seeded_normal(seed, (*shape[:2], shape[2] - prefix_frames, *shape[3:]))
    return noise


def given_schedule(sigmas: Sequence[float], preset: Preset) -> SigmaSchedule:
    """Schedule of a SIGMAS input (falling, ends with 0), with the preset's own list for the first block if it has one."""
    if len(sigmas) < 2 or sigmas[-1] != 0:
        raise ConfigError(f"sigmas are {[round(s, 4) for s in sigmas]}; expected falling values that end with 0: use a "
                          "full schedule (denoise 1) without a split")
    own = schedule(preset)
    if len(sigmas) == len(own.sigmas) + 1 and all(abs(a - b) < SAME_SIGMA for a, b in zip(sigmas, own.sigmas)):
        return own  # the family may tell the model other timesteps than 1000 sigma
    return SigmaSchedule(tuple(sigmas[:-1]), own.first_block, None, own.first_timesteps)


def planned_kv_bytes(policy: PolicySettings, geometry: RunGeometry, width: int, element_bytes: int, rows: int, heads: int = 1) -> int:
    """Bytes the cache will hold at most. ``width`` = heads x head dim, ``rows`` = batch rows over all branches.

    The store has its full size from the first call on; once frames are evicted, the last block's former rows are kept
    too.
    """
    compressed = plan_of(policy, geometry, heads, width // heads, element_bytes, rows)
    if compressed is not None:
        return compressed.total_bytes
    total, window = geometry.total_frames, policy.window_frames
    stored = total if window is None else window + (policy.sink_frames if policy.kind == "rolling" else 0)
    capacity = min(stored, total)
    undo = min(geometry.block, capacity) if capacity < total else 0
    per_frame = kv_bytes_per_frame(geometry.num_layers, width, geometry.tokens_per_frame, element_bytes, rows)
    return (capacity + undo) * per_frame


def largest_window(policy: PolicySettings, geometry: RunGeometry, width: int, element_bytes: int, rows: int,
                   room: int) -> int:
    """Latent frames of the largest window of a plain cache that fits into ``room`` bytes; 0 when not even two blocks do."""
    per_frame = kv_bytes_per_frame(geometry.num_layers, width, geometry.tokens_per_frame, element_bytes, rows)
    window = room // max(1, per_frame) - geometry.block
    return int(window) if window >= policy.sink_frames + 2 * geometry.block else 0


def unused_prompts(starts: Sequence[int], canvas: Canvas, block: int) -> list[str]:
    """A warning when prompts never hold: they begin after the end, or before the next block already the next one holds.

    ``starts``: first latent frames, rising, the first 0.
    """
    begins = [planned.start for planned in plan_blocks(canvas.latent_frames, block, canvas.prefix_frames)]
    held = {max(start for start in starts if start <= begin) for begin in begins}
    lost = [start for start in starts[1:] if start not in held]
    if not lost:
        return []
    frames = ", ".join(map(str, lost))
    text = (f"prompts that begin in latent frames {frames} are never used: the video ends before a block begins there, or the next "
            f"prompt holds already (prompts switch at blocks of {block} latent frames)")
    return [text]


def kept_in_words(policy: PolicySettings) -> str:
    """What a cache keeps, for log lines and reports."""
    if policy.kind == "tempcache" and policy.tempcache is not None:
        settings = policy.tempcache
        return (f"everything, merged into {settings.budget_frames:g} latent frames (sink {policy.sink_frames}, recent "
                f"{settings.recent_frames})")
    if policy.window_frames is None:
        return "everything"
    return f"{policy.window_frames} latent frames (sink {policy.sink_frames})"


@dataclass
class Choice:
    """Everything decided before the host is touched; ``warnings`` in words."""

    preset: Preset
    run: RunChoice
    canvas: Canvas
    fps: float
    seed: int
    cfg: float
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.warnings += run_warnings(self.preset, self.run, self.canvas.latent_frames, self.canvas.prefix_frames)
        self.warnings += check_cfg(self.preset, self.cfg)

    @property
    def policy(self) -> PolicySettings:
        return self.run.policy

    def as_report(self) -> dict[str, object]:
        """Settings for the run report."""
        policy, canvas, run = self.policy, self.canvas, self.run
        switch = "rebuild" if run.rebuild else policy.recache if run.recache_frames else "none"
        return {
            "preset": self.preset.key, "block": self.preset.block, "seed": self.seed, "cfg": self.cfg, "fps": self.fps,
            "width": canvas.width, "height": canvas.height, "length": canvas.length, "batch": canvas.batch,
            "loop": run.loop, "solver": run.solver, "prompt_switch": switch,
            "prefix_latent_frames": canvas.prefix_frames,
            "cache": {"policy": policy.kind, "window_frames": policy.window_frames, "sink_frames": policy.sink_frames,
                      "positions": policy.positions, "keeps": kept_in_words(policy),
                      **({"tempcache": asdict(policy.tempcache)} if policy.tempcache is not None else {})},
        }
