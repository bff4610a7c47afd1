"""Puts a TempCache on a MODEL and says what it will hold."""

from __future__ import annotations

from typing import Any

import comfy.model_management as management

from ...fastar_core.decode_plan import in_words
from ...fastar_core.errors import MemoryPlanError
from ...fastar_core.geometry import PIXELS_PER_LATENT, RunGeometry, token_grid
from ...fastar_core.policies import PolicySettings
from ...fastar_core.stream_choice import kept_in_words
from ...fastar_core.tempcache.fitting import fit_family, fit_memory, plan_of
from ...fastar_core.tempcache.settings import AUTO_MEMORY, TempCacheSettings
from .hook import check_model
from .memory import compute_dtype, room_for
from .patch import settings_of, with_settings

EXAMPLE_SIZE = (832, 480)
EXAMPLE_BLOCK = 3
ENDLESS = 100_000  # latent frames: the plan of a video that is never over


def with_tempcache(model: Any, settings: TempCacheSettings, sink: int) -> tuple[Any, str]:
    """A clone of ``model`` that carries the policy, and its plan in words for one prompt at the family's size.

    Raises ConfigError when the budget holds no history.
    """
    check_model(model.model.diffusion_model)
    policy = PolicySettings("tempcache", sink_frames=sink, tempcache=settings)
    return with_settings(model, policy=policy), _plan_in_words(model, policy)


def _plan_in_words(model: Any, policy: PolicySettings) -> str:
    preset = settings_of(model).preset
    network = model.model.diffusion_model
    width, height = (preset.width, preset.height) if preset is not None else EXAMPLE_SIZE
    block = preset.block if preset is not None else EXAMPLE_BLOCK
    geometry = RunGeometry(ENDLESS, block, *token_grid(height // PIXELS_PER_LATENT, width // PIXELS_PER_LATENT), len(network.blocks))
    given = (network.num_heads, network.dim // network.num_heads, management.dtype_size(compute_dtype(model.model)), 1)
    try:
        fitted = fit_memory(fit_family(policy, preset, block), geometry, *given, room_for(model.load_device))
    except MemoryPlanError as reason:  # the video to come may be smaller
        return f"at {width} x {height} pixels and one prompt this cannot run: {reason}."
    plan = plan_of(fitted, geometry, *given)
    assert plan is not None
    assert fitted.tempcache is not None
    lines = [f"the cache keeps {kept_in_words(fitted)}.", f"At {width} x {height} pixels and one prompt {plan.words()}."]
    if fitted.tempcache.reindex_span is not None:
        lines.append(f"Older frames are moved to within {fitted.tempcache.reindex_span} latent frames before the one being made.")
    if policy.tempcache is not None and policy.tempcache.memory_gb == AUTO_MEMORY:
        lines.append(f"{in_words(room_for(model.load_device))} are free now; the run asks again.")
    return " ".join(lines)
