"""From a preset and what the user chose to how a run goes: loop, cache rule, prompt switches, restarts, solver, longest call.

Both sampler nodes ask here, so that a family runs the same way through either.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from .drivers import LoopKind, Restart, SolverKind, call_frames, timeline_frames
from .errors import ConfigError
from .geometry import PIXEL_FRAMES_PER_LATENT, RunGeometry
from .policies import PolicySettings
from .policies.base import PositionRule, RecacheMode
from .presets import Preset, check_length, check_prefix, check_window
from .tempcache.fitting import fit_family

if TYPE_CHECKING:
    from .settings import FastARSettings

CACHE_CHOICES = ("preset", "full", "sink_window")
SWITCH_CHOICES = ("preset", "keep", "drop", "rebuild", "none")
RECACHE_FRAMES = 12


@dataclass(frozen=True)
class RunChoice:
    """How a run goes. ``call_frames``: latent frames of its longest model call. ``recache_frames``: recomputed at a prompt
    switch (None = nothing is); ``rebuild``: everything is. ``restart`` has no anchor yet: only a node with a VAE can give one."""

    loop: LoopKind
    policy: PolicySettings
    block: int
    call_frames: int
    recache_frames: int | None = None
    rebuild: bool = False
    restart: Restart | None = None
    solver: SolverKind = "renoise"
    warnings: list[str] = field(default_factory=list, compare=False)

    def geometry(self, total_frames: int, prefix_frames: int, rows: int, cols: int, num_layers: int) -> RunGeometry:
        """Sizes for the cache policy."""
        frames = timeline_frames(self.restart, total_frames, prefix_frames)
        return RunGeometry(frames, self.block, rows, cols, num_layers, min(self.call_frames, total_frames))

    def needs_anchor(self, total_frames: int) -> bool:
        """True when the timeline will start over from a decoded frame that is encoded again."""
        return self.restart is not None and not self.restart.keep_first and total_frames > self.restart.rollout_frames


def preset_policy(preset: Preset) -> PolicySettings:
    """The backbone's own cache rule: everything, its window and sink, or those of a rolling window."""
    if preset.loop == "rolling":
        return PolicySettings("rolling", preset.window_frames, preset.sink_frames)
    positions: PositionRule = "slot" if preset.positions == "slot" else "absolute"
    if preset.window_frames is None:
        return PolicySettings(positions=positions)
    return PolicySettings("sink_window", preset.window_frames, preset.sink_frames, positions)


def fit_policy(policy: PolicySettings, preset: Preset) -> PolicySettings:
    """The same limits under the rules of the preset's loop; a compressed history serves every loop as it is."""
    if policy.kind == "tempcache" or (policy.kind == "rolling") == (preset.loop == "rolling"):
        return policy
    if preset.loop == "rolling":
        sink = preset.sink_frames if policy.kind == "full" else policy.sink_frames
        return replace(policy, kind="rolling", window_frames=None if policy.kind == "full" else policy.window_frames, sink_frames=sink)
    return replace(policy, kind="full" if policy.window_frames is None else "sink_window")


def choose_policy(cache: str, window: int, sink: int, preset: Preset, settings: FastARSettings | None) -> PolicySettings:
    """Cache rule of the run: "preset" = what a patch node set on the model, else the family's own rule.

    With a rolling preset, "full" is the extended history: its rules without a limit.
    """
    base = preset_policy(preset)
    if cache == "preset":
        own = settings.policy if settings is not None else None
        return fit_policy(own, preset) if own is not None else base
    if cache == "full":
        return fit_policy(replace(base, kind="full", window_frames=None, sink_frames=0), preset)
    if cache != "sink_window":
        raise ConfigError(f"cache is '{cache}', expected one of {', '.join(CACHE_CHOICES)}")
    if window < sink + preset.block:
        raise ConfigError(f"a window of {window} latent frames cannot hold a sink of {sink} and a block of {preset.block}; "
                          f"raise window to {sink + preset.block} or more, or lower sink")
    return fit_policy(replace(base, kind="sink_window", window_frames=window, sink_frames=sink), preset)


def unused_policy(cache: str, settings: FastARSettings | None) -> list[str]:
    """A warning when the sampler's own cache rule stands above what a patch node set on the model."""
    own = settings.policy if settings is not None else None
    if own is None or cache == "preset":
        return []
    return [f"the model carries the cache '{own.kind}' of another node, which is not used: cache is '{cache}', not 'preset'"]


def preset_restart(preset: Preset) -> Restart | None:
    """When the family's timeline starts over; its anchor is the decoded frame before those of the other context frames."""
    if preset.rollout_frames is None or preset.context_frames is None:
        return None
    return Restart(preset.rollout_frames, preset.context_frames, PIXEL_FRAMES_PER_LATENT * (preset.context_frames - 1) + 1)


def _switch(preset: Preset, policy: PolicySettings, choice: str, switching: bool) -> tuple[PolicySettings, int | None, bool, list[str]]:
    """Policy with its recache rule, frames recomputed at a prompt switch, whether all are, warnings."""
    if choice not in SWITCH_CHOICES:
        raise ConfigError(f"prompt_switch is '{choice}', expected one of {', '.join(SWITCH_CHOICES)}")
    if choice == "preset":
        by_family = "keep" if preset.recache_frames else "none"
        choice = policy.recache if policy.recache != "keep" else by_family
    mode = cast(RecacheMode, "keep" if choice == "none" else choice)
    policy = policy if policy.recache == mode else replace(policy, recache=mode)
    if preset.loop == "rolling":
        told = [f"{preset.label}: a new prompt holds from the first window that begins at its frame on; nothing is recomputed"]
        return policy, None, False, told if switching else []
    if choice == "rebuild":
        return policy, None, True, []
    if choice == "none":
        return policy, None, False, []
    if preset.rollout_frames is not None:
        told = [f"prompt_switch {choice}: {preset.label} recomputes its context at every restart anyway; choose none or rebuild"]
        return policy, None, False, told if switching else []
    if policy.kind == "tempcache" and policy.tempcache is not None and choice == "keep":
        # groups stay as they are, only pinned frames are written anew
        return policy, min(policy.tempcache.recent_frames, preset.recache_frames or RECACHE_FRAMES) or None, False, []
    frames = policy.window_frames if policy.kind == "sink_window" else None
    return policy, frames or preset.recache_frames or RECACHE_FRAMES, False, []


def choose_run(preset: Preset, policy: PolicySettings, num_levels: int, prompt_switch: str = "preset",
               switching: bool = False) -> RunChoice:
    """The run of a preset under ``policy``. ``num_levels``: steps of its schedule; ``switching``: the prompt will change.

    Raises ConfigError for a choice that does not exist.
    """
    loop = cast(LoopKind, preset.loop)
    policy = fit_family(policy, preset, call_frames(loop, preset.block, num_levels, None))
    policy, recache, rebuild, warnings = _switch(preset, policy, prompt_switch, switching)
    recache = recache if switching else None
    return RunChoice(loop, policy, preset.block, call_frames(loop, preset.block, num_levels, recache), recache,
                     rebuild and switching, preset_restart(preset), cast(SolverKind, preset.solver), warnings)


def run_warnings(preset: Preset, run: RunChoice, total_frames: int, prefix_frames: int) -> list[str]:
    """Warnings about length, start frames and window of a run."""
    policy = run.policy
    own = run.call_frames if run.loop == "rolling" else run.block
    unbounded = policy.window_frames is None and (policy.tempcache is None or policy.tempcache.reindex_span is None)
    return [*run.warnings, *(check_length(preset, total_frames) if unbounded else []),
            *check_prefix(preset, prefix_frames), *check_window(preset, policy.window_frames, policy.sink_frames, run.block, own)]
