"""What the host's memory manager has to know about a streaming run, and what it knows that the run has to ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import comfy.model_management as management
import torch

from ...fastar_core.errors import MemoryPlanError
from ...fastar_core.geometry import RunGeometry
from ...fastar_core.policies import PolicySettings
from ...fastar_core.stream_choice import Canvas, largest_window, planned_kv_bytes
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


@dataclass(frozen=True)
class CachePlan:
    """Bytes on ``device``: the cache, one model call's activations (the host's estimate), and the room there is."""

    device: torch.device
    kv_bytes: int
    call_bytes: int
    room_bytes: int
    largest_window: int

    def check(self, canvas: Canvas) -> None:
        """Raises MemoryPlanError when cache and one model call do not fit together, whatever else is unloaded."""
        if self.kv_bytes + self.call_bytes <= self.room_bytes:
            return
        cure = (f"choose cache 'sink_window' with a window of {self.largest_window} latent frames or fewer, or lower"
                if self.largest_window else "lower")
        raise MemoryPlanError(
            f"the cache for {canvas.latent_frames} latent frames of {canvas.width} x {canvas.height} pixels needs "
            f"{self.kv_bytes / GIB:.2f} GiB and one model call {self.call_bytes / GIB:.2f} GiB, but at most "
            f"{self.room_bytes / GIB:.2f} GiB can be had on {self.device}; {cure} width, height, length or batch_size")


def plan_cache(patcher: Any, policy: PolicySettings, geometry: RunGeometry, latent_shape: tuple[int, ...],
               branches: int, sorted_copy: bool = False) -> CachePlan:
    """Bytes of a run over latents of ``latent_shape`` [B, C, T, h, w] with ``branches`` conditioning entries; ``sorted_copy``: AnnSA
    keeps keys and values a second time, in bucket order."""
    base, device = patcher.model, patcher.load_device
    width = base.diffusion_model.dim
    element = management.dtype_size(compute_dtype(base))
    batch = latent_shape[0]
    rows = batch * branches
    longest = min(max(geometry.block, geometry.call_frames), latent_shape[2])
    call = int(base.memory_required([rows, latent_shape[1], longest, *latent_shape[3:]]))
    room = room_for(device)
    copies = 2 if sorted_copy else 1
    kv_bytes = copies * planned_kv_bytes(policy, geometry, width, element, rows)
    window = largest_window(policy, geometry, width, element, rows, (room - call) // copies)
    return CachePlan(device, kv_bytes, call, room, window)


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
