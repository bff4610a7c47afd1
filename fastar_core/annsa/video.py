"""Sparse self-attention of models that denoise a whole video at once.

Keys are grouped inside latent frames, so one sorted order holds both the frames and the buckets: a query always sees its own frame
and chooses buckets of the others. Where the frames of a sequence are not known, it is cut into even pieces; a query then always sees
the pieces nearest to it. Text rows of joint attention stay dense both ways.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from .buckets import bucket_means, fit_centroids, nearest_centroid, sign_codes, sign_planes
from .cost import CallSize, pays
from .key_buffer import build
from .sparse import SparseAttention
from .walk import Queries, plan_walk

MOST_KEY_BUCKETS = 256
ROWS_PER_KEY_BUCKET, ROWS_PER_QUERY_BUCKET = 8, 256
PIECES, QUERY_PIECES = 64, 16


@dataclass(frozen=True)
class VideoRows:
    """Where a call's sequence holds video: ``frames`` x ``tokens`` rows from row ``start`` on. frames 0 = unknown, ``tokens`` rows."""

    start: int
    frames: int
    tokens: int

    @property
    def rows(self) -> int:
        return max(1, self.frames) * self.tokens


class VideoSparse(SparseAttention):
    """start_call(sigma, False) before every model call; attend_video() for every self-attention."""

    def attend_video(self, layer: int, sigma: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, video: VideoRows,
                     dense: Any) -> torch.Tensor | None:
        """q, k, v [B, N, H, D] of one call; ``dense``(q, k, v) computes what stays dense. None = all of it does."""
        pairs = q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
        reason = self._why_video_dense(layer, sigma, q, video)
        if reason is not None:
            self.tally.dense(reason, pairs)
            return None
        start, end = video.start, video.start + video.rows
        out = self._attend_video(layer, sigma, q, k, v, video)
        if out is None or video.rows == q.shape[1]:
            return out
        text = [dense(q[:, a:b], k, v) if b > a else q[:, :0] for a, b in ((0, start), (end, q.shape[1]))]
        return torch.cat([text[0], out, text[1]], 1)

    def _why_video_dense(self, layer: int, sigma: float, q: torch.Tensor, video: VideoRows) -> str | None:
        settings = self.settings
        if sigma not in self.window:
            return "noisy step"
        if layer in settings.dense_layers and not settings.calibrate:
            return "layer in the list"
        groups, buckets = self._sizes(video)
        text = q.shape[1] - video.rows
        least = text + (video.tokens if video.frames else 2 * video.tokens // PIECES)
        if video.frames == 1 or buckets < 2 or settings.density * q.shape[1] <= least:
            return "one frame" if video.frames == 1 else "always visible keys use up the density"
        size = CallSize(video.rows, q.shape[1], q.shape[0] * q.shape[2], q.shape[3], groups, buckets, 1)
        if settings.only_if_faster and not settings.calibrate and not pays(size, settings.density, q.device.type, q.element_size()):
            return "sparse would not be 10 % faster"
        return None

    @staticmethod
    def _sizes(video: VideoRows) -> tuple[int, int]:
        """Query and key buckets of a call."""
        if not video.frames:
            return min(QUERY_PIECES, video.tokens), min(PIECES, video.tokens)
        keys = max(1, min(16, MOST_KEY_BUCKETS // video.frames, video.tokens // ROWS_PER_KEY_BUCKET))
        queries = max(1, min(4, video.tokens // ROWS_PER_QUERY_BUCKET))
        return video.frames * queries, video.frames * keys

    def _attend_video(self, layer: int, sigma: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
                      video: VideoRows) -> torch.Tensor | None:
        span = (video.start, video.start + video.rows)
        outside = tuple((a, b) for a, b in ((0, span[0]), (span[1], k.shape[1])) if b > a)
        groups, buckets = self._sizes(video)
        some_q, some_k = (x[:, span[0]:span[1]].transpose(1, 2) for x in (q, k))
        codes, _ = self._group(some_k, video, buckets, (layer, "keys"))
        buffer = build(k, v, None, (outside, (span,), ()), codes, buckets, self.backend, sigma)
        query_codes, centres = self._group(some_q, video, groups, (layer, "queries"))
        queries = Queries(some_q.transpose(1, 2), query_codes, centres)
        must = self._must(video, groups, buckets, q.device)
        walk = plan_walk(queries, buffer, self.settings.density, must, self._shares.get(layer), self.backend)
        self._offers[layer] = walk.offers
        return self._finish(walk, queries, buffer, layer, sigma, round(1e6 * sigma))

    def _group(self, x: torch.Tensor, video: VideoRows, count: int, key: Hashable) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes int32 [B, H, N] of rows x [B, H, N, D] and the centre of each bucket, float32 [B, H, count, D]."""
        batch, heads, rows, _ = x.shape
        if video.frames:
            each = count // video.frames
            folded = x.unflatten(2, (video.frames, -1)).transpose(1, 2).flatten(0, 1)
            local, centroids = self._in_frame(folded, each, key)
            first = torch.arange(video.frames, device=x.device, dtype=torch.int32)[:, None] * each
            codes = (local.unflatten(0, (batch, -1)).transpose(1, 2) + first).flatten(2).contiguous()
            return codes, centroids.unflatten(0, (batch, -1)).transpose(1, 2).flatten(2, 3)
        codes = (torch.arange(rows, device=x.device) * count // rows).int().expand(batch, heads, -1).contiguous()
        means, _ = bucket_means(x, torch.ones(x.shape[:3], device=x.device), codes, count, self.backend)
        return codes, means

    def _in_frame(self, x: torch.Tensor, count: int, key: Hashable) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes int32 [G, H, S] of rows x [G, H, S, D] below ``count``, and the centre of each bucket, float32 [G, H, count, D]."""
        weight = torch.ones(x.shape[:3], device=x.device)
        if self.settings.buckets == "sign" and count > 1:
            planes = sign_planes(x.shape[1], x.shape[3], count.bit_length() - 1, self.settings.seed, x.device)
            codes = sign_codes(x, x.float().mean(2), planes, self.backend)
            return codes, bucket_means(x, weight, codes, count, self.backend)[0]
        centroids = fit_centroids(x, weight, count, self._centroids.get(key), self.backend)
        self._centroids[key] = centroids
        return nearest_centroid(x, centroids, self.backend), centroids

    @staticmethod
    def _must(video: VideoRows, groups: int, buckets: int, device: torch.device) -> torch.Tensor:
        """bool [groups, buckets]: buckets of the query's own frame, or pieces that overlap its own."""
        pieces = video.frames or groups
        mine = torch.arange(groups, device=device) * pieces // groups
        theirs = torch.arange(buckets, device=device) * pieces // buckets
        last = ((torch.arange(buckets, device=device) + 1) * pieces - 1) // buckets
        return (mine[:, None] >= theirs) & (mine[:, None] <= last)
