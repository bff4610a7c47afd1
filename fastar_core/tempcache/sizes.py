"""How a budget is split over the parts of a layer's store."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ConfigError
from ..geometry import RunGeometry
from .settings import TempCacheSettings


@dataclass(frozen=True)
class StoreSizes:
    """Latent frames of each part (history in rows) and the token grid of a frame."""

    sink: int
    recent: int
    own: int
    history_rows: int
    rows: int
    cols: int

    @property
    def tokens(self) -> int:
        return self.rows * self.cols

    @property
    def pinned_rows(self) -> int:
        return (self.sink + self.recent) * self.tokens


def store_sizes(settings: TempCacheSettings, sink: int, geometry: RunGeometry) -> StoreSizes:
    """Splits the budget; raises ConfigError when nothing is left for the history."""
    pinned = sink + settings.recent_frames
    rows = int((settings.budget_frames - pinned) * geometry.tokens_per_frame)
    if rows < geometry.tokens_per_frame:
        raise ConfigError(f"a budget of {settings.budget_frames:g} latent frames leaves no room for history beside a sink of {sink} "
                          f"and {settings.recent_frames} recent frames; set it to {pinned + 1} or more")
    if not settings.carry_frames:  # a history that outlives its timeline has no known length
        rows = min(rows, max(1, geometry.total_frames - pinned) * geometry.tokens_per_frame)
    return StoreSizes(sink, settings.recent_frames, max(geometry.block, geometry.call_frames), rows, geometry.rows, geometry.cols)
