"""Decides, call by call, which prompt rows a text cross-attention computes with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from ..attention import Attention
from ..sigma_window import sigma_window
from .keep import keep_tokens
from .row_groups import HIDDEN, RowGroups, find_groups, joined
from .settings import AnnCASettings


@dataclass(frozen=True)
class PromptCall:
    """One model call: ``sigma`` the highest noise level in it (0 = a clean pass), ``frames`` its latent frames (1 = unknown: all
    queries decide together), ``block`` anything that changes when keep sets must be decided anew."""

    sigma: float
    frames: int
    block: Hashable


@dataclass
class _Kept:
    """Prompt rows of each frame: index int64 and bias float32 [B * F, n]."""

    index: torch.Tensor
    bias: torch.Tensor


class PromptPruner:
    """AnnCA of one run. start_call() before every model call, attend() for every text cross-attention in it.

    Row groups are kept per conditioning entry and prompt length (an entry's text does not change under its id); keep sets per layer
    and entries of the call, until the block changes.
    """

    def __init__(self, settings: AnnCASettings, attention: Attention, schedule: Sequence[float]) -> None:
        self.settings = settings
        self.attention = attention
        self.window = sigma_window(schedule, settings.start, settings.end)
        self.counters: Counter[str] = Counter()
        self.ran: set[tuple[float, int]] = set()
        self._groups: dict[Hashable, RowGroups] = {}
        self._kept: dict[Hashable, _Kept] = {}
        self._true: dict[Hashable, bool] = {}
        self._call: tuple[PromptCall, tuple[Hashable, ...], RowGroups] | None = None
        self._share: list[torch.Tensor] = []

    def start_call(self, context: torch.Tensor | None, entries: Sequence[Hashable], call: PromptCall) -> None:
        """context [B, L, C] as the model gets it; ``entries`` name the conditioning entries it holds, in order, of equal batch."""
        if self._call is None or self._call[0].block != call.block:
            self._kept.clear()
        self._call = None
        if context is None or context.ndim != 3 or not entries or context.shape[0] % len(entries):
            return
        step = context.shape[0] // len(entries)
        parts = []
        for i, entry in enumerate(entries):
            key = (entry, tuple(context.shape[1:]), step)
            if key not in self._groups:
                self._groups[key] = find_groups(context[i * step:(i + 1) * step])
            parts.append(self._groups[key])
        self._call = (call, tuple(entries), joined(parts))

    @property
    def text_rows(self) -> int:
        """Rows of the prompt of the current call; 0 when it has none."""
        return 0 if self._call is None else self._call[2].rows

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
        """Cross-attention output [B, N, H, D], or None when the plain dense call is right as it is."""
        if self._call is None or k.shape[1] != self._call[2].rows or k.shape[0] != self._call[2].index.shape[0]:
            self.counters["left alone: no prompt of that length"] += 1
            return None
        call, entries, groups = self._call
        if not self._trusted((layer, entries), k, groups):
            self.counters["left alone: keys of equal rows differ"] += 1
            return None
        if self.settings.keep != "all" and call.sigma in self.window and q.shape[1] % call.frames == 0:
            self.ran.add((call.sigma, layer))
            return self._attend_kept((layer, entries), q, k, v, call.frames, groups)
        if not groups.merges:
            self.counters["left alone: no equal rows"] += 1
            return None
        self.counters["merged"] += 1
        return self.attention.attend(q, _rows(k, groups.index), _rows(v, groups.index), groups.log_count[:, None])

    def _trusted(self, key: Hashable, k: torch.Tensor, groups: RowGroups) -> bool:
        """Whether the keys come from the prompt's rows: looked at once per layer and prompt (a host read). They do not when another
        node feeds its own text, or where a model adds positions to its text."""
        if key not in self._true:
            self._true[key] = groups.true_for(k)
        return self._true[key]

    def _attend_kept(self, key: Hashable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, frames: int,
                     groups: RowGroups) -> torch.Tensor:
        folded = q.unflatten(1, (frames, -1)).flatten(0, 1)
        if key not in self._kept:
            self._kept[key] = self._decide(folded, k, frames, groups)
        kept = self._kept[key]
        self.counters["kept by frame"] += 1
        keys, values = (_rows(x.repeat_interleave(frames, 0), kept.index) for x in (k, v))
        out = self.attention.attend(folded, keys, values, kept.bias[:, None])
        return out.unflatten(0, (-1, frames)).flatten(1, 2)

    def _decide(self, folded: torch.Tensor, k: torch.Tensor, frames: int, groups: RowGroups) -> _Kept:
        """One host read per layer and block: how many tokens the neediest frame keeps."""
        index, log_count = (t.repeat_interleave(frames, 0) for t in (groups.index, groups.log_count))
        valid = log_count > HIDDEN
        place = torch.arange(index.shape[1], device=index.device)
        always = valid & ((place == 0) | (place == groups.padding.repeat_interleave(frames, 0)[:, None]))
        padding = place == groups.padding.repeat_interleave(frames, 0)[:, None]
        keep = keep_tokens(folded, _rows(k.repeat_interleave(frames, 0), index), valid, always, self.settings, self.attention.backend,
                           padding, log_count)
        self._share.append(((keep & ~padding).sum() / (valid & ~padding).sum().clamp_min(1)).float())
        size = int(keep.sum(-1).max())
        order = (~keep).float().argsort(dim=-1, stable=True)[:, :size]
        bias = torch.where(torch.gather(keep, 1, order), torch.gather(log_count, 1, order), HIDDEN)
        return _Kept(torch.gather(index, 1, order), bias)

    def report(self) -> dict[str, object]:
        """Counts of text cross-attention calls by what was done, rows before and after the exact merge, mean share kept."""
        merged = [{"rows": g.rows, "distinct": int((g.log_count > HIDDEN).sum(-1).max())} for g in self._groups.values()]
        share = float(torch.stack(self._share).mean()) if self._share else None
        return {"calls": dict(self.counters), "prompts": merged, **({} if share is None else {"kept_share": round(share, 4)})}

    def close(self) -> None:
        """Frees the tensors of the run."""
        self._groups.clear()
        self._kept.clear()
        self._true.clear()
        self._share.clear()
        self._call = None


def _rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows index [B, n] of x [B, L, H, D]."""
    return torch.gather(x, 1, index[:, :, None, None].expand(-1, -1, *x.shape[2:]))
