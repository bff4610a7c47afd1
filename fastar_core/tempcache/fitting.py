"""From what the node says to what a run does: the family's sink and trained range, and the memory there is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..geometry import RunGeometry
from ..policies.base import PolicySettings
from .plan import TempCachePlan, budget_from_bytes, plan_tempcache, with_budget
from .settings import AUTO_MEMORY, FAMILY_CONTEXT, FAMILY_SINK, FAMILY_SPAN, TempCacheSettings

if TYPE_CHECKING:
    from ..presets import Preset

GB = 10**9
TRAINED_FRAMES = 21  # of the families that do not say


def fit_family(policy: PolicySettings, preset: Preset | None, own_frames: int) -> PolicySettings:
    """The policy with the family's sink (at least one frame) and re-index span filled in; other policies as they are.

    ``own_frames``: latent frames of the longest denoise call. A family that counts positions inside its window never saw others,
    so its history is always re-indexed.
    """
    settings = policy.tempcache
    if policy.kind != "tempcache" or settings is None:
        return policy
    if policy.sink_frames == FAMILY_SINK:
        policy = replace(policy, sink_frames=max(1, preset.sink_frames if preset is not None else 0))
    in_window = preset is not None and preset.positions == "slot"
    if settings.reindex_span == FAMILY_SPAN or (in_window and settings.reindex_span is None):
        settings = replace(settings, reindex_span=family_span(preset, own_frames))
    if settings.carry_frames == FAMILY_CONTEXT:
        settings = replace(settings, carry_frames=(preset.context_frames if preset is not None else None) or 0)
    settings = with_budget(settings, settings.budget_frames, policy.sink_frames)
    return policy if settings is policy.tempcache else replace(policy, tempcache=settings)


def family_span(preset: Preset | None, own_frames: int) -> int:
    """Latent frames before a call that its family was trained to look back over."""
    trained = TRAINED_FRAMES
    if preset is not None:
        bounds = (preset.window_frames, preset.max_frames_trained) if preset.positions == "slot" else \
            (preset.max_frames_trained, preset.window_frames)
        trained = bounds[0] or bounds[1] or TRAINED_FRAMES
    return max(1, trained - own_frames)


def fit_memory(policy: PolicySettings, geometry: RunGeometry, heads: int, head_dim: int, element_bytes: int, rows: int,
               room_bytes: int) -> PolicySettings:
    """The policy with its budget lowered until it keeps the memory limit: a number of GB, or ``room_bytes``.

    Raises MemoryPlanError when not even a budget of one history frame does.
    """
    settings = policy.tempcache
    if policy.kind != "tempcache" or settings is None or settings.memory_gb == 0:
        return policy
    limit = room_bytes if settings.memory_gb == AUTO_MEMORY else int(settings.memory_gb * GB)
    largest = budget_from_bytes(settings, policy.sink_frames, geometry, heads, head_dim, element_bytes, rows, limit)
    if settings.budget_frames <= largest.budget_frames:
        return policy
    return replace(policy, tempcache=largest)


def plan_of(policy: PolicySettings, geometry: RunGeometry, heads: int, head_dim: int, element_bytes: int,
            rows: int) -> TempCachePlan | None:
    """The plan of a run's policy; None when it is another policy."""
    if policy.kind != "tempcache" or policy.tempcache is None:
        return None
    return plan_tempcache(policy.tempcache, policy.sink_frames, geometry, heads, head_dim, element_bytes, rows)


def choose_settings(base: TempCacheSettings, budget: int, memory_gb: float, recent: int, threshold: float,
                    **chosen: object) -> TempCacheSettings:
    """A preset with what was chosen over it; 0 for ``budget`` and ``threshold``, -1 for ``recent``, None in ``chosen`` = as it is."""
    if memory_gb < 0 and memory_gb != AUTO_MEMORY:
        raise ConfigError(f"memory_gb is {memory_gb:g}; set it to 0 (no limit), {AUTO_MEMORY} (what is free) or a number of gigabytes")
    changes: dict[str, object] = {name: value for name, value in chosen.items() if value is not None}
    changes["memory_gb"] = memory_gb
    if budget:
        changes["budget_frames"] = float(budget)
    if recent >= 0:
        changes["recent_frames"] = recent
    if threshold:
        changes |= {"threshold": threshold, "floor": min(base.floor, threshold)}
    return replace(base, **changes)  # type: ignore[arg-type]
