"""What a TempCache will hold, known before the first call; and the budgets behind the presets of the node."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..decode_plan import in_words
from ..errors import ConfigError, MemoryPlanError
from ..geometry import RunGeometry
from .policy import USAGE_QUERIES
from .regroup import fold_rows
from .settings import TempCacheSettings
from .sizes import StoreSizes, store_sizes

OFF = "off"
PRESETS: dict[str, TempCacheSettings] = {
    "quality": TempCacheSettings(budget_frames=30, threshold=0.99, shared=False),
    "balanced": TempCacheSettings(budget_frames=18, threshold=0.99, shared=False),
    "small": TempCacheSettings(budget_frames=9, threshold=0.99, shared=False),
}
NARROW_BYTES = 4 + 8 + 8 + 4 + 4 + 8 + 4  # multiplicity, frame, cell, usage, correction, nearest row and its likeness
SLOT_BYTES = 8
FLOAT_BYTES = 4


@dataclass(frozen=True)
class TempCachePlan:
    """Bytes per layer, in total (both over all batch rows and branches), and the latent frame at which the history is full at
    the latest (None = it never is)."""

    layer_bytes: int
    total_bytes: int
    full_at_frame: int | None

    def words(self) -> str:
        when = "is never full" if self.full_at_frame is None else f"is full after {self.full_at_frame} latent frames at the latest"
        return (f"TempCache holds {in_words(self.layer_bytes)} per layer, {in_words(self.total_bytes)} in all; its "
                f"history {when}")


def plan_tempcache(settings: TempCacheSettings, sink: int, geometry: RunGeometry, heads: int, head_dim: int, element_bytes: int,
                   rows: int) -> TempCachePlan:
    """Bytes at their highest, just before a commit; ``rows`` = batch rows over all branches. Counts what TempCache.bytes() counts.

    Heads without history (quiet_heads) save memory that the plan does not promise.
    """
    sizes = store_sizes(settings, sink, geometry)
    layer = rows * (_store_bytes(settings, sizes, heads, head_dim, element_bytes)
                    + _undo_bytes(settings, sizes, geometry.block, heads, head_dim, element_bytes))
    if settings.search == "lsh":
        layer += rows * (heads if settings.shared else 1) * head_dim * settings.bits * settings.tables * FLOAT_BYTES
    turned = sizes.tokens * head_dim // 2 * 2 * FLOAT_BYTES * (2 * sizes.own + 1)  # rotary tables of two calls, angles of a frame
    full_at = (sizes.pinned_rows + sizes.history_rows) // sizes.tokens
    return TempCachePlan(layer, layer * geometry.num_layers + rows * turned, full_at if full_at < geometry.total_frames else None)


def _row_bytes(settings: TempCacheSettings, heads: int, head_dim: int, element_bytes: int) -> int:
    """Key and value of one history row as they are stored."""
    wide = heads * head_dim
    if settings.history_type == "int8":
        pair = 2 * (2 * wide + heads * FLOAT_BYTES)
    else:
        key_bytes = _mean_bytes(element_bytes) if settings.representative == "mean" else element_bytes
        pair = wide * (key_bytes + _mean_bytes(element_bytes))
    return pair + (wide * FLOAT_BYTES if settings.representative == "medoid" else 0)


def _mean_bytes(element_bytes: int) -> int:
    """High and low part of a running mean; float32 has no low part."""
    return element_bytes if element_bytes >= FLOAT_BYTES else 2 * element_bytes


def _store_bytes(settings: TempCacheSettings, sizes: StoreSizes, heads: int, head_dim: int, element_bytes: int) -> int:
    """One layer and batch row without what is kept for undoing: the buffer, home keys, the pool."""
    groups, wide = 1 if settings.shared else heads, heads * head_dim
    moves = settings.space == "pre" or settings.reindex_span is not None
    packed = settings.history_type == "int8"
    total = (sizes.pinned_rows + sizes.own * sizes.tokens) * 2 * wide * element_bytes
    total += sizes.pinned_rows * wide * element_bytes if moves else 0
    total += sizes.history_rows * _row_bytes(settings, heads, head_dim, element_bytes)
    total += sizes.history_rows * wide * element_bytes if moves and not packed else 0
    total += groups * (sizes.history_rows * (NARROW_BYTES + FLOAT_BYTES) + sizes.tokens * SLOT_BYTES)
    return total + (2 * wide * head_dim * FLOAT_BYTES if settings.similarity == "logit" else 0)


def _undo_bytes(settings: TempCacheSettings, sizes: StoreSizes, block: int, heads: int, head_dim: int, element_bytes: int) -> int:
    """One layer and batch row: what the last commit changed, and what the clean pass holds for its commit."""
    groups, wide = 1 if settings.shared else heads, heads * head_dim
    moves = settings.space == "pre" or settings.reindex_span is not None
    total = min(block, sizes.recent) * sizes.tokens * wide * element_bytes * (3 if moves else 2)
    total += block * sizes.tokens * (_row_bytes(settings, heads, head_dim, element_bytes) + groups * SLOT_BYTES)
    total += groups * sizes.history_rows * NARROW_BYTES
    if settings.folds:
        rows = fold_rows(sizes.tokens, sizes.history_rows)
        total += block * rows * (_row_bytes(settings, heads, head_dim, element_bytes) + groups * SLOT_BYTES)
    total += block * sizes.tokens * wide * element_bytes if moves else 0
    total += min(USAGE_QUERIES, block * sizes.tokens) * wide * element_bytes
    return total + (2 * wide * head_dim * FLOAT_BYTES if settings.similarity == "logit" else 0)


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
