"""Keys and values of one layer and branch in bucket order: [always visible | history by bucket | own rows].

Sorted once per block; only the own rows are written again at every step.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch

from ...kernels import registry
from ..key_rows import Spans, span_rows
from .buckets import bucket_means


def take(x: torch.Tensor, spans: Spans) -> torch.Tensor:
    """Rows of the spans of x [B, N, ...] (axis 1)."""
    parts = [x[:, start:end] for start, end in spans]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1) if parts else x[:, :0]


def pick_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[B, H, n, D]: rows int64 [B, H, n] of x [B, N, H, D], whole rows at a time (gather reads an index for every element)."""
    batch, count, heads, dim = x.shape
    b, h = (torch.arange(n, device=x.device) for n in (batch, heads))
    by_head = not x.is_contiguous() and x.transpose(1, 2).is_contiguous()
    if by_head:
        index = (b[:, None, None] * heads + h[:, None]) * count + rows
    else:
        index = (b[:, None, None] * count + rows) * heads + h[:, None]
    flat = (x.transpose(1, 2) if by_head else x).reshape(-1, dim)
    return flat.index_select(0, index.flatten()).view(*rows.shape, dim)


@dataclass
class KeyBuffer:
    """``keys``, ``values`` [B, H, N, D]; ``bias`` float32 [B, H, N] or None; ``offsets`` int32 [B, H, K + 1] rows of the buffer where
    each history bucket begins and ends; ``means`` float32 [B, H, K, D] and ``log_weight`` [B, H, K] (log of the multiplicities in it).
    ``made_for``: owner's block the order belongs to."""

    made_for: Hashable
    always: int
    own: int
    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor | None
    offsets: torch.Tensor
    means: torch.Tensor
    log_weight: torch.Tensor

    @property
    def rows(self) -> int:
        return self.keys.shape[2]

    def bytes(self) -> int:
        held = [self.keys, self.values, self.offsets, self.means, self.log_weight]
        return sum(t.numel() * t.element_size() for t in held + ([] if self.bias is None else [self.bias]))

    def write_own(self, k: torch.Tensor, v: torch.Tensor, own: Spans) -> None:
        """Takes the call's own rows from k, v [B, N, H, D]."""
        for store, source in ((self.keys, k), (self.values, v)):
            store[:, :, self.rows - self.own:] = take(source, own).transpose(1, 2)

    def always_keys(self) -> torch.Tensor:
        """Keys every query sees [B, H, n, D]."""
        return torch.cat([self.keys[:, :, :self.always], self.keys[:, :, self.rows - self.own:]], 2)

    def arguments(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """keys and values [B, N, H, D] and bias, as the ops take them."""
        return self.keys.transpose(1, 2), self.values.transpose(1, 2), self.bias


def row_weights(bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Multiplicity float32 [B, H, N] of rows like [B, H, N, D]: 1 without a bias, 0 where hidden."""
    if bias is None:
        return torch.ones(like.shape[:3], device=like.device)
    return bias.exp().expand(like.shape[:3]).contiguous()


def build(k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, spans: tuple[Spans, Spans, Spans], codes: torch.Tensor,
          count: int, backend: str, made_for: Hashable) -> KeyBuffer:
    """Sorts the history rows of k, v [B, N, H, D] by codes int32 [B, H, history rows]; own rows are left for write_own."""
    always, history, own = spans
    order, offsets = registry.call("bucket_order", backend, codes, count)
    picked = order.long()
    front, middle, back = span_rows(always), span_rows(history), span_rows(own)
    batch, _, heads, dim = k.shape
    numbers = torch.cat([torch.arange(a, b, device=k.device) for a, b in history])
    buffers = []
    for source in (k, v):
        out = source.new_empty((batch, heads, front + middle + back, dim))
        out[:, :, :front] = take(source, always).transpose(1, 2)
        out[:, :, front:front + middle] = pick_rows(source, numbers[picked])
        buffers.append(out)
    sorted_bias = None
    if bias is not None:
        by_row = bias.expand(batch, heads, -1).transpose(1, 2)
        sorted_bias = bias.new_zeros((batch, heads, front + middle + back))
        sorted_bias[:, :, :front] = take(by_row, always).transpose(1, 2)
        sorted_bias[:, :, front:front + middle] = torch.gather(take(by_row, history).transpose(1, 2), 2, picked)
    inside = slice(front, front + middle)
    ordered = torch.gather(codes, 2, picked)
    weights = row_weights(None if sorted_bias is None else sorted_bias[:, :, inside], buffers[0][:, :, inside])
    means, total = bucket_means(buffers[0][:, :, inside], weights, ordered, count, backend)
    return KeyBuffer(made_for, front, back, buffers[0], buffers[1], sorted_bias, (offsets + front).int(), means, total.log())
