"""Sparse self-attention of one run: decides per call, keeps the bucket order of the keys, counts what it did (design: 7)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ..key_rows import KeyRows, Spans, span_rows
from ..noise import SEED_LIMIT
from ..sigma_window import sigma_window
from .buckets import fit_centroids, nearest_centroid, sign_codes, sign_planes
from .choose import Offers, balanced_shares
from .codes import SharedCodes
from .cost import CallSize, pays
from .key_buffer import KeyBuffer, build, row_weights, take
from .settings import AnnSASettings
from .tally import Tally
from .walk import Queries, Walk, kept_mass, plan_walk

SEED_STRIDE = 7919


class SparseAttention:
    """start_call() before every model call, attend() for every self-attention of a cache policy; None = do it densely.

    Keys of owner and layer are sorted once per block. A dense pass over a block (clean, recache, prefill) drops all orders, since it
    may change keys.
    """

    def __init__(self, settings: AnnSASettings, schedule: Sequence[float], backend: str = "auto") -> None:
        self.settings = settings
        self.window = sigma_window(schedule, settings.dense_share)
        self.steps = max(1, sum(s in self.window for s in schedule))
        self.backend = backend
        self.tally = Tally()
        self.shared = SharedCodes(settings, backend) if settings.buckets == "shared" else None
        self._shares: dict[Hashable, torch.Tensor] = {}
        self._buffers: dict[Hashable, KeyBuffer] = {}
        self._centroids: dict[Hashable, torch.Tensor] = {}
        self._offers: dict[Hashable, Offers] = {}
        self._block: Hashable = None

    # -- the run ------------------------------------------------------------------------------------------------------

    def start_call(self, block: Hashable, commits: bool) -> None:
        """Announces a model call. Between blocks the pairs are balanced anew over all layers, by what the last step offered."""
        if self._offers and (block != self._block or not self._shares or commits) and self.settings.balance == "model":
            self._shares = dict(zip(self._offers, balanced_shares(list(self._offers.values()))))
        if block != self._block or commits:
            self._offers.clear()
            self._buffers.clear()
        self._block = block

    def bytes(self) -> int:
        """Bytes of the sorted copies and of what is known about buckets."""
        held = list(self._centroids.values())
        codes = 0 if self.shared is None else self.shared.bytes()
        return sum(b.bytes() for b in self._buffers.values()) + sum(t.numel() * t.element_size() for t in held) + codes

    def report(self) -> dict[str, object]:
        return self.tally.report(self.settings.target_recall)

    def close(self) -> None:
        """Frees the tensors of the run."""
        self._buffers.clear()
        self._centroids.clear()
        self._offers.clear()
        self._shares.clear()
        if self.shared is not None:
            self.shared.clear()

    # -- one call -----------------------------------------------------------------------------------------------------

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, rows: KeyRows,
               dense: Any) -> torch.Tensor | None:
        """q, k, v [B, tokens, H, D], bias float32 [B, H|1, keys]; ``dense``(q, k, v, bias) computes what stays dense.

        In a call over frames of several noise levels the noisier ones stay dense.
        """
        ctx = rows.ctx
        if ctx.phase != "denoise":
            return None
        pairs = q.shape[0] * q.shape[2] * q.shape[1] * k.shape[1]
        active = [sigma in self.window for sigma in ctx.sigmas]
        spans = rows.spans(self.settings.recent_frames)
        reason = self._why_dense(rows, active, spans, q, k)
        if reason is not None:
            self.tally.dense(reason, pairs)
            return None
        if all(active):
            return self._attend(q, k, v, bias, rows, spans, max(ctx.sigmas))
        each = q.shape[1] // len(active)
        quiet, noisy = (torch.cat([torch.arange(i * each, (i + 1) * each) for i, on in enumerate(active) if on == wanted]).to(q.device)
                        for wanted in (True, False))
        some = q.index_select(1, quiet)
        sparse = self._attend(some, k, v, bias, rows, spans, max(s for s, on in zip(ctx.sigmas, active) if on))
        out = torch.empty_like(q)
        out.index_copy_(1, quiet, dense(some, k, v, bias) if sparse is None else sparse)
        return out.index_copy_(1, noisy, dense(q.index_select(1, noisy), k, v, bias))

    def _why_dense(self, rows: KeyRows, active: list[bool], spans: tuple[Spans, Spans, Spans], q: torch.Tensor,
                   k: torch.Tensor) -> str | None:
        settings = self.settings
        if not any(active):
            return "noisy step"
        if rows.layer in settings.dense_layers and not settings.calibrate:
            return "layer in the list"
        history = span_rows(spans[1])
        if history == 0 or settings.density * k.shape[1] <= k.shape[1] - history:
            return "no history beyond the always visible frames" if history == 0 else "always visible keys use up the density"
        if self.shared is not None and not (all(active) and self.shared.ready(rows)):
            return "no codes from the text attention yet"
        size = CallSize(q.shape[1], k.shape[1], q.shape[0] * q.shape[2], q.shape[3], settings.queries_in(q.shape[1], q.device.type),
                        settings.key_buckets, self.steps if rows.ctx.uniform else 1)
        if settings.only_if_faster and not settings.calibrate and not pays(size, settings.density, q.device.type, q.element_size()):
            return "sparse would not be 10 % faster"
        return None

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, rows: KeyRows,
                spans: tuple[Spans, Spans, Spans], sigma: float) -> torch.Tensor | None:
        key = rows.key
        made_for = (rows.ctx.block, rows.ctx.start, k.shape[1], q.device, q.dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.made_for != made_for:
            buffer = self._buffers[key] = self._sorted(k, v, bias, rows, spans, made_for)
        buffer.write_own(k, v, spans[2])
        queries, must = self._queries(q, rows, buffer)
        walk = plan_walk(queries, buffer, self.settings.density, must, self._shares.get(key), self.backend)
        self._offers[key] = walk.offers
        return self._finish(walk, queries, buffer, rows.layer, sigma, rows.ctx.start * SEED_STRIDE + rows.ctx.step)

    def _finish(self, walk: Walk, queries: Queries, buffer: KeyBuffer, layer: int, sigma: float, moment: int) -> torch.Tensor | None:
        """Runs the walk, or only measures it; ``moment`` tells the measured queries of one call from those of others."""
        q = queries.q
        many = q.shape[0] * q.shape[1] * q.shape[2]
        if self.settings.calibrate:
            seed = (self.settings.seed * SEED_STRIDE + layer) * SEED_STRIDE + moment
            self.tally.recall(layer, kept_mass(walk, queries, buffer, seed % SEED_LIMIT))
            self.tally.dense("calibrating", many * buffer.rows)
            return None
        self.tally.sparse(sigma, layer, walk.tiles.executed_pairs(), many * (buffer.always + buffer.own), many * buffer.rows)
        return walk.run(queries, buffer, self.backend)

    # -- buckets ------------------------------------------------------------------------------------------------------

    def _sorted(self, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, rows: KeyRows, spans: tuple[Spans, Spans, Spans],
                made_for: Hashable) -> KeyBuffer:
        history = take(k, spans[1]).transpose(1, 2)
        by_row = None if bias is None else take(bias.transpose(1, 2), spans[1]).transpose(1, 2)
        kind, key = self.settings.buckets, (rows.key, "keys")
        if self.shared is not None:
            codes, count = self.shared.of_keys(rows, spans[1], history), self.shared.buckets
        elif kind == "sign":
            count = 1 << self.settings.bits
            self._centroids[key] = history.float().mean(2)
            codes = sign_codes(history, self._centroids[key], self._planes(history), self.backend)
        else:
            count = min(self.settings.key_buckets, history.shape[2])
            weight = (row_weights(by_row, history) > 0).float()
            centroids = fit_centroids(history, weight, count, self._centroids.get(key), self.backend)
            self._centroids[key] = centroids
            codes = nearest_centroid(history, centroids, self.backend)
        return build(k, v, bias, spans, codes, count, self.backend, made_for)

    def _planes(self, x: torch.Tensor) -> torch.Tensor:
        return sign_planes(x.shape[1], x.shape[3], self.settings.bits, self.settings.seed, x.device)

    def _queries(self, q: torch.Tensor, rows: KeyRows, buffer: KeyBuffer) -> tuple[Queries, torch.Tensor | None]:
        """Grouped queries; with sign and shared codes also the rule that a query sees its own bucket."""
        by_head = q.transpose(1, 2)
        ones = torch.ones(by_head.shape[:3], device=q.device)
        if self.settings.buckets == "kmeans":
            count = self.settings.queries_in(q.shape[1], q.device.type)
            key = (rows.key, "queries")
            centres = fit_centroids(by_head, ones, count, self._centroids.get(key), self.backend)
            self._centroids[key] = centres
            return Queries(q, nearest_centroid(by_head, centres, self.backend), centres), None
        count = buffer.means.shape[2]
        if self.shared is not None:
            codes = self.shared.of_queries(rows, by_head)
        else:
            codes = sign_codes(by_head, self._centroids[(rows.key, "keys")], self._planes(by_head), self.backend)
        centres = by_head.new_zeros((*by_head.shape[:2], count, by_head.shape[3]), dtype=torch.float32)
        index = codes.long()[..., None].expand_as(by_head)
        centres = centres.scatter_reduce(2, index, by_head.float(), "mean", include_self=False)
        return Queries(q, codes, centres), torch.eye(count, dtype=torch.bool, device=q.device)
