"""Buckets shared with the text cross-attention (the paper's way): a token's bucket is the sign hash of its text query.

The code of a committed token comes from the clean pass that wrote its key; that of a noisy token from the step before.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ...kernels import registry
from ..context import FwdCtx
from ..key_rows import KeyRows, Spans
from .buckets import sign_planes
from .settings import AnnSASettings


class SharedCodes:
    """Codes per owner, layer and latent frame, int32 [B, tokens of a frame], from full-width text queries."""

    def __init__(self, settings: AnnSASettings, backend: str) -> None:
        self.settings = settings
        self.backend = backend
        self.buckets = 1 << settings.bits
        self._frames: dict[tuple[Hashable, int], dict[int, torch.Tensor]] = {}
        self._noisy: dict[tuple[Hashable, int], tuple[int, torch.Tensor]] = {}
        self._means: dict[tuple[Hashable, int], torch.Tensor] = {}

    def note(self, owner: Hashable, layer: int, q: torch.Tensor, ctx: FwdCtx) -> None:
        """Text queries q [B, frames * tokens, H, D] of one branch. The mean they are centred by is that of the first call."""
        key = (owner, layer)
        flat = q.flatten(2)[:, :, None]
        if key not in self._means:
            self._means[key] = flat.float().mean(1)
        planes = sign_planes(1, flat.shape[-1], self.settings.bits, self.settings.seed, q.device)
        codes = registry.call("hash_codes", self.backend, flat, self._means[key], planes)[:, 0]
        if ctx.commits:
            held = self._frames.setdefault(key, {})
            for i, frame_codes in enumerate(codes.split(ctx.tokens_per_frame, dim=1)):
                held[ctx.start + i] = frame_codes
        else:
            self._noisy[key] = (ctx.start, codes)

    def ready(self, rows: KeyRows) -> bool:
        """Whether the codes of the call's queries and of all committed frames are known."""
        key = (rows.owner, rows.layer)
        noisy = self._noisy.get(key)
        if noisy is None or noisy[0] != rows.ctx.start or noisy[1].shape[1] != rows.ctx.num_frames * rows.ctx.tokens_per_frame:
            return False
        held = self._frames.get(key, {})
        whole = [frame for _, _, frame in rows.parts if frame is not None and not rows.ctx.start <= frame < rows.ctx.end]
        merged = any(frame is None and count for _, count, frame in rows.parts)
        return all(frame in held for frame in whole) and not (merged and rows.places is None)

    def of_queries(self, rows: KeyRows, q: torch.Tensor) -> torch.Tensor:
        """int32 [B, H, N] for queries q [B, H, N, D]."""
        codes = self._noisy[(rows.owner, rows.layer)][1]
        return codes[:, None].expand(-1, q.shape[1], -1).contiguous()

    def of_keys(self, rows: KeyRows, history: Spans, keys: torch.Tensor) -> torch.Tensor:
        """int32 [B, H, n] for the history rows keys [B, H, n, D]: merged rows have the code of their newest token."""
        held = self._frames[(rows.owner, rows.layer)]
        parts = []
        for start, count, frame in rows.parts:
            if not any(low <= start < high for low, high in history):
                continue
            if frame is not None:
                parts.append(held[frame][:, None].expand(-1, keys.shape[1], -1))
            elif count and rows.places is not None:
                table = torch.cat([held[f] for f in range(max(held) + 1)], 1) if held else keys.new_zeros(0)
                places = rows.places().expand(keys.shape[0], keys.shape[1], -1)
                parts.append(torch.gather(table[:, None].expand(-1, keys.shape[1], -1), 2, places))
        return torch.cat(parts, 2).int().contiguous()

    def bytes(self) -> int:
        held = [codes for frames in self._frames.values() for codes in frames.values()]
        held += [codes for _, codes in self._noisy.values()]
        return sum(t.numel() * t.element_size() for t in held)

    def clear(self) -> None:
        self._frames.clear()
        self._noisy.clear()
        self._means.clear()
