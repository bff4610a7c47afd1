"""The contract every cache policy fulfils, and the settings that choose one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from ..attention import Attention
from ..context import FwdCtx
from ..errors import ConfigError
from ..geometry import RunGeometry
from ..positions import RopeSpec
from ..tempcache.settings import TempCacheSettings

PolicyKind = Literal["full", "sink_window", "rolling", "tempcache"]
PositionRule = Literal["absolute", "slot"]
RecacheMode = Literal["keep", "drop", "rebuild"]


@dataclass(frozen=True)
class PolicySettings:
    """What a user can choose about the cache.

    ``window_frames`` counts all visible latent frames, sink and own block (``rolling``: own window) included; ``sink_window``
    needs it, for ``rolling`` None means the extended history, ``full`` ignores it and ``sink_frames``.
    ``positions``: "absolute" = the latent frame number; "slot" = rank among the visible frames (``rolling`` has its own rule).
    ``tempcache`` holds the settings of that policy, which reads ``sink_frames`` beside them.
    ``recache``: at a prompt switch the pinned sink stays ("keep") or goes ("drop") when it is not among the recached frames, or
    the driver fills the cache anew from all clean latents ("rebuild").
    """

    kind: PolicyKind = "full"
    window_frames: int | None = None
    sink_frames: int = 0
    positions: PositionRule = "absolute"
    recache: RecacheMode = "keep"
    tempcache: TempCacheSettings | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> PolicySettings:
        return self


class CachePolicy(ABC):
    """Keys and values of one branch (one conditioning entry) over a run.

    The driver's owner calls begin(ctx) before and commit(ctx) after every model call; the model's layers call attend. Denoise
    calls never change committed state; replaying one gives the same output and leaves the store equal.
    """

    @abstractmethod
    def begin(self, ctx: FwdCtx) -> None:
        """Plans one model call: which frames it writes and sees. Raises GeometryError for a call out of order."""

    @abstractmethod
    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: FwdCtx) -> torch.Tensor:
        """Attention output of one layer; all tensors [B, ctx.num_frames * S, heads, head_dim], q and k before RoPE."""

    @abstractmethod
    def commit(self, ctx: FwdCtx) -> None:
        """Makes the rows of a clean, recache or prefill call permanent."""

    @abstractmethod
    def rollback(self, start: int) -> None:
        """Undoes the last committed block, which must begin at latent frame ``start``."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets everything and frees the memory."""

    @abstractmethod
    def bytes(self) -> int:
        """Bytes of every tensor the policy holds."""

    @abstractmethod
    def visible_frames(self, start: int, num_frames: int) -> tuple[int, ...]:
        """Latent frames a denoise call over [start, start + num_frames) attends to, own block included, ascending."""

    def report(self) -> dict[str, object]:
        """What the policy did, as plain data; empty when there is nothing to tell."""
        return {}


def make_policy(settings: PolicySettings, geometry: RunGeometry, rope: RopeSpec, attention: Attention) -> CachePolicy:
    """Builds the policy named by the settings. Raises ConfigError for sizes that cannot work."""
    from ..tempcache.policy import TempCache
    from .frame_cache import FrameCache
    from .rolling import RollingCache

    total, window, sink = geometry.total_frames, settings.window_frames, settings.sink_frames
    for name, value, known in (("positions", settings.positions, PositionRule), ("recache", settings.recache, RecacheMode)):
        if value not in get_args(known):
            raise ConfigError(f"{name} {value!r} is unknown; choose {' or '.join(get_args(known))}")
    if settings.kind == "tempcache":
        return TempCache(settings, geometry, rope, attention)
    if settings.kind == "full":
        return FrameCache(total, 0, settings, geometry, rope, attention)
    if settings.kind not in ("sink_window", "rolling"):
        raise ConfigError(f"cache policy {settings.kind!r} is unknown; choose full, sink_window, rolling or tempcache")
    if window is None and settings.kind == "sink_window":
        raise ConfigError("policy sink_window needs window_frames (it counts sink and own block); got none")
    if sink < 0:
        raise ConfigError(f"sink_frames is {sink}; choose 0 (no sink) or more latent frames")
    if window is not None and window < sink + geometry.block:
        raise ConfigError(f"a window of {window} latent frames cannot hold a sink of {sink} and a block of "
                          f"{geometry.block}; raise window_frames to {sink + geometry.block} or lower sink_frames")
    if settings.kind == "rolling":
        stored = total if window is None else min(window + sink, total)
        return RollingCache(stored, sink, settings, geometry, rope, attention)
    return FrameCache(min(window or total, total), sink, settings, geometry, rope, attention)
