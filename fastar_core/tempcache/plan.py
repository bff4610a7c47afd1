"""What a TempCache will hold, known before the first call; and the budgets behind the presets of the node."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import ConfigError, MemoryPlanError
from ..geometry import RunGeometry
from .policy import store_sizes
from .settings import TempCacheSettings

OFF = "off"
PRESETS: dict[str, TempCacheSettings] = {
    "quality": TempCacheSettings(budget_frames=36, threshold=0.99, floor=0.8),
    "balanced": TempCacheSettings(budget_frames=24, threshold=0.99, floor=0.8),
    "small": TempCacheSettings(budget_frames=14, threshold=0.97, floor=0.7),
}
INDEX_BYTES = 8 * 2 + 4 * 2  # frame and cell, multiplicity and usage of a history row
PER_ROW_BYTES = 4 * 2  # bias and mass of a buffer row


@dataclass(frozen=True)
class TempCachePlan:
    """Bytes per layer and branch row, in total, and the latent frame at which the history is full at the latest."""

    layer_bytes: int
    total_bytes: int
    full_at_frame: int

    def words(self) -> str:
        return (f"TempCache holds {self.layer_bytes / 2**20:.1f} MiB per layer, {self.total_bytes / 2**30:.2f} GiB in all; its history is "
                f"full after {self.full_at_frame} latent frames at the latest")


def plan_tempcache(settings: TempCacheSettings, sink: int, geometry: RunGeometry, heads: int, head_dim: int, element_bytes: int,
                   rows: int) -> TempCachePlan:
    """Bytes of the stores of all layers; ``rows`` = batch rows over all branches. Counts what LayerStore.bytes() counts."""
    sizes = store_sizes(settings, sink, geometry)
    groups = 1 if settings.shared else heads
    tokens, history = sizes.tokens, sizes.history_rows
    wide = heads * head_dim
    buffer = sizes.buffer_rows * (2 * wide * element_bytes + groups * PER_ROW_BYTES)
    raw = sizes.pinned_frames * tokens * wide * element_bytes
    pool = history * (wide * (element_bytes + 4) + groups * INDEX_BYTES) + groups * tokens * 8
    kept = element_bytes + 4
    if settings.representative != "last":
        pool += history * wide * 4
        kept += 4
    undo = geometry.block * (tokens * wide * (3 * element_bytes + kept) + groups * (history * INDEX_BYTES + tokens * 8))
    moment = 2 * heads * head_dim * head_dim * 4 if settings.similarity == "logit" else 0
    layer = rows * (buffer + raw + pool + undo + moment)
    full_at = sizes.pinned_frames + -(-history // tokens)
    return TempCachePlan(layer, layer * geometry.num_layers, full_at)


def with_budget(settings: TempCacheSettings, budget_frames: float, sink: int) -> TempCacheSettings:
    """The same settings with another budget in latent frames. Raises ConfigError when it holds no history."""
    least = sink + settings.recent_frames + 1
    if budget_frames < least:
        raise ConfigError(f"a budget of {budget_frames:g} latent frames holds no history beside {sink} sink and "
                          f"{settings.recent_frames} recent frames; set it to {least} or more")
    return replace(settings, budget_frames=budget_frames)


def budget_from_bytes(settings: TempCacheSettings, sink: int, geometry: RunGeometry, heads: int, head_dim: int, element_bytes: int,
                      rows: int, room_bytes: int) -> TempCacheSettings:
    """The largest whole budget whose plan fits into ``room_bytes``. Raises MemoryPlanError when none does."""
    low, high = sink + settings.recent_frames + 1, max(geometry.total_frames, sink + settings.recent_frames + 1)

    def fits(frames: int) -> bool:
        plan = plan_tempcache(replace(settings, budget_frames=frames), sink, geometry, heads, head_dim, element_bytes, rows)
        return plan.total_bytes <= room_bytes

    if not fits(low):
        raise MemoryPlanError(f"even a budget of {low} latent frames does not fit into {room_bytes / 2**30:.2f} GiB; lower width, "
                              "height, sink or recent frames")
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return replace(settings, budget_frames=low)
