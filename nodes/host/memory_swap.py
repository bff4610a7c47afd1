"""Swapping the VAE and the diffusion model while a run is under way.

Loading the VAE asks the host for gigabytes, and the host answers by unloading the largest model, which is the one
that is sampling. The host itself never samples again without loading, so nothing else notices; a run that decodes
between blocks must load the model again after every use of the VAE and make sure that it is really there, patches
(LoRA) included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from comfy import model_management

from ...fastar_core.errors import MemoryPlanError


def same_device(a: torch.device | str, b: torch.device | str) -> bool:
    """True for two names of one device; an index left out stands for the current one, as in the host."""
    first, second = torch.device(a), torch.device(b)
    return first.type == second.type and (first.index == second.index or None in (first.index, second.index))


def use_vae(vae: Any, bytes_needed: int) -> None:
    """Load the VAE through the host's memory manager with room for `bytes_needed` of working memory.

    Raises MemoryPlanError when its weights are not where it will compute.
    """
    model_management.load_models_gpu([vae.patcher], memory_required=bytes_needed,
                                     force_full_load=getattr(vae, "disable_offload", False))
    fault = weights_fault(vae.patcher)
    if fault:
        raise MemoryPlanError(f"the host could not load the VAE: {fault}. Free memory (smaller width and height, "
                              "fewer loaded models) or start ComfyUI with --cpu-vae")


def after_vae(patcher: Any, memory_required: int = 0, others: Sequence[Any] = ()) -> None:
    """Bring the model that is sampling back after the VAE was used; see ensure_loaded."""
    ensure_loaded(patcher, memory_required, others)


def ensure_loaded(patcher: Any, memory_required: int = 0, others: Sequence[Any] = ()) -> None:
    """Load `patcher` (and `others`, such as control nets of the run) and check that it can go on sampling.

    memory_required: bytes of working memory and caches of the next model calls. Does nothing costly when the model
    never left. Raises MemoryPlanError when weights are elsewhere or patches are not applied.
    """
    model_management.load_models_gpu([patcher, *others], memory_required=memory_required)
    if getattr(patcher.model, "current_patcher", patcher) is None:
        patcher.pre_run()  # the host's cleanup took the model's link to its patcher; sampling reads it
    fault = weights_fault(patcher) or patches_fault(patcher)
    if fault:
        raise MemoryPlanError(f"the model that was sampling did not come back after the VAE was used: {fault}. Set "
                              "decode to 'at the end', or lower width, height or the cache window")


def _dynamic(patcher: Any) -> bool:
    """Newer hosts keep some models virtual and fetch weights while computing: there is no place to check then."""
    return bool(getattr(patcher, "is_dynamic", bool)())


def weights_fault(patcher: Any) -> str | None:
    """Why the weights cannot be used on patcher.load_device, in words; None when they can.

    A model that the host loaded partly keeps weights elsewhere and moves them at each call; that is no fault.
    """
    if _dynamic(patcher):
        return None
    model, wanted = patcher.model, patcher.load_device
    place = patcher.current_loaded_device()
    if not same_device(place, wanted):
        return f"it is on {place}, expected on {wanted}"
    if getattr(model, "model_lowvram", False):
        return None
    away = [name for name, weight in model.named_parameters() if not same_device(weight.device, wanted)]
    if away:
        return f"{len(away)} of its weights are not on {wanted} (the first: {away[0]})"
    return None


def patches_fault(patcher: Any) -> str | None:
    """Why the weight patches are not in effect, in words; None when they are.

    The host marks the model with the patch set it loaded; patches that it skips by itself are not asked for.
    """
    if _dynamic(patcher) or not patcher.patches or patcher.model.current_weight_patches_uuid == patcher.patches_uuid:
        return None
    return f"its {len(patcher.patches)} weight patches (LoRA) are not applied"
