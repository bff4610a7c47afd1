"""What the host's memory manager has to know about a streaming run, and what it knows that the run has to ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import comfy.model_management as management
import torch

from ...fastar_core.decode_plan import in_words
from ...fastar_core.errors import MemoryPlanError
from ...fastar_core.geometry import RunGeometry
from ...fastar_core.policies import PolicySettings
from ...fastar_core.stream_choice import Canvas, largest_window, planned_kv_bytes
from ...fastar_core.tempcache.fitting import fit_memory, plan_of
from ...fastar_core.tempcache.plan import budget_from_bytes
from .memory_swap import ensure_loaded

GIB = 1024**3


def compute_dtype(base_model: Any) -> torch.dtype:
    """The dtype of activations, keys and values (weights may be stored smaller)."""
    return base_model.manual_cast_dtype or base_model.get_dtype()


def room_for(device: torch.device) -> int:
    """Bytes a run could use on ``device`` when the host unloads every model there that it can."""
    free = int(management.get_free_memory(device))
    if device.type in ("cpu", "mps"):  # there, unloading moves weights within the same memory
        return free
    return free + sum(int(m.model_loaded_memory()) for m in management.current_loaded_models
                      if m.device == device and not m.is_dead())


def active_branches(guider: Any) -> int:
    """Conditioning entries of the host's guider that can take part in a call."""
    unused = "negative" if getattr(guider, "cfg", 1.0) == 1.0 else None
    return max(1, sum(len(entries or ()) for role, entries in guider.conds.items() if role != unused))


@dataclass(frozen=True)
class CachePlan:
    """Bytes on ``device``: the cache, one model call's activations (the host's estimate), and the room there is.

    ``policy``: the cache rule with its budget fitted to a memory limit; ``largest``: latent frames of a window, or of a TempCache
    budget, that would fit (0 = none); ``words``: what TempCache holds and when it is full.
    """

    device: torch.device
    kv_bytes: int
    call_bytes: int
    room_bytes: int
    largest: int
    policy: PolicySettings
    words: str = ""

    def __str__(self) -> str:
        return self.words or in_words(self.kv_bytes)

    def check(self, canvas: Canvas) -> None:
        """Raises MemoryPlanError when cache and one model call do not fit together, whatever else is unloaded."""
        if self.kv_bytes + self.call_bytes <= self.room_bytes:
            return
        merged = self.policy.kind == "tempcache"
        way = "set the budget of FAST-AR TempCache to" if merged else "choose cache 'sink_window' with a window of"
        cure = f"{way} {self.largest} latent frames or fewer, or lower" if self.largest else "lower"
        raise MemoryPlanError(
            f"the cache for {canvas.latent_frames} latent frames of {canvas.width} x {canvas.height} pixels needs "
            f"{self.kv_bytes / GIB:.2f} GiB and one model call {self.call_bytes / GIB:.2f} GiB, but at most "
            f"{self.room_bytes / GIB:.2f} GiB can be had on {self.device}; {cure} width, height, length or batch_size")


def plan_cache(patcher: Any, policy: PolicySettings, geometry: RunGeometry, latent_shape: tuple[int, ...],
               branches: int, sorted_copy: bool = False) -> CachePlan:
    """Bytes of a run over latents of ``latent_shape`` [B, C, T, h, w] with ``branches`` conditioning entries; ``sorted_copy``: AnnSA
    keeps keys and values a second time, in bucket order."""
    base, device = patcher.model, patcher.load_device
    network = base.diffusion_model
    element = management.dtype_size(compute_dtype(base))
    rows = latent_shape[0] * branches
    longest = min(max(geometry.block, geometry.call_frames), latent_shape[2])
    call = int(base.memory_required([rows, latent_shape[1], longest, *latent_shape[3:]]))
    room = room_for(device)
    copies = 2 if sorted_copy else 1
    given = (network.num_heads, network.dim // network.num_heads, element, rows)
    policy = fit_memory(policy, geometry, *given, (room - call) // copies)
    plan = plan_of(policy, geometry, *given)
    if plan is not None:
        largest = _largest_budget(policy, geometry, given, (room - call) // copies)
        return CachePlan(device, copies * plan.total_bytes, call, room, largest, policy, plan.words())
    kv_bytes = copies * planned_kv_bytes(policy, geometry, network.dim, element, rows)
    largest = largest_window(policy, geometry, network.dim, element, rows, (room - call) // copies)
    return CachePlan(device, kv_bytes, call, room, largest, policy)


def _largest_budget(policy: PolicySettings, geometry: RunGeometry, given: tuple[int, int, int, int], room: int) -> int:
    """Latent frames of the largest TempCache budget that fits; 0 when none does."""
    assert policy.tempcache is not None
    try:
        return int(budget_from_bytes(policy.tempcache, policy.sink_frames, geometry, *given, room).budget_frames)
    except MemoryPlanError:
        return 0


def make_room(patcher: Any, needed: int) -> None:
    """Tells the host that ``needed`` bytes besides the weights will be used: other models go first, then our weights."""
    device = patcher.load_device
    loaded = [m for m in management.current_loaded_models if m.model is not None and m.model.is_clone(patcher)]
    management.free_memory(needed, device, keep_loaded=loaded)
    if device.type != "cpu" and management.get_free_memory(device) < needed:
        ensure_loaded(patcher, needed)


def check_ram(canvas: Canvas) -> None:
    """Raises MemoryPlanError when all frames together do not fit into the free RAM."""
    free = int(management.get_free_memory(torch.device("cpu")))
    if canvas.pixel_bytes > free:
        raise MemoryPlanError(f"{canvas.batch} x {canvas.length} frames of {canvas.width} x {canvas.height} need "
                              f"{canvas.pixel_bytes / GIB:.2f} GiB of RAM as IMAGE, {free / GIB:.2f} GiB are free; set "
                              "frames_to to 'file' or lower length")
