"""Recall, density and output error of a cache policy, exactly as design 9 defines them, against an uncompressed copy of its own keys.

For every measured denoise call and layer, 64 seeded queries attend densely over everything committed plus the own block, and over
what the policy really shows. Dropping policies: mass on visible keys. Merging ones: 1 - 1/2 sum_g |P_g - p_g|.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from bench.demo_engine import DemoEngine
from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.policies.frame_cache import FrameCache
from fastar_pack.fastar_core.positions import RopeSpec, Rotary
from fastar_pack.fastar_core.tempcache.policy import TempCache
from fastar_pack.fastar_core.tempcache.pool import Ingested

QUERIES = 64


@dataclass
class Sample:
    """Mean figures of one (layer, step, block): recall per head [H] over all keys and over history keys."""

    block: int
    everything: torch.Tensor
    history: torch.Tensor
    history_mass: torch.Tensor
    error: float


@dataclass
class Shadow:
    """Uncompressed rotated keys and values of one layer [H, frames * S, D], and for each token the history row it lives in."""

    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    slots: list[torch.Tensor] = field(default_factory=list)


class RecallEngine(DemoEngine):
    """Measures the denoise calls of the blocks in ``measured``. Slots are those of shared decisions or of each head."""

    measured: frozenset[int] = frozenset()

    def prepare(self, measured: set[int]) -> None:
        self.measured = frozenset(measured)
        self.shadows: dict[int, Shadow] = defaultdict(Shadow)
        self.samples: list[Sample] = []
        self.pairs: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
        geometry = self.run.geometry
        self.rotary = Rotary(RopeSpec(self.run.rope.head_dim), geometry.rows, geometry.cols)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ctx: FwdCtx) -> torch.Tensor:
        frames = list(range(ctx.start, ctx.end))
        policy = self.policy()
        shadow = self.shadows[layer]
        rotated_q, rotated_k = (self.rotary.rotate(x, frames)[0].transpose(0, 1) for x in (q, k))
        values = v[0].transpose(0, 1)
        out = policy.attend(layer, q, k, v, ctx)
        if isinstance(policy, TempCache) and policy.stores(layer)[0].watch is None:
            policy.stores(layer)[0].watch = lambda frame, went, at=layer: self._follow(at, frame, went)
        if ctx.phase == "denoise" and ctx.block in self.measured:
            placed = policy.call_positions if isinstance(policy, TempCache) else frames
            placed_q = self.rotary.rotate(q, placed)[0].transpose(0, 1)
            self._measure(layer, (rotated_q, placed_q), rotated_k, values, out[0].transpose(0, 1), ctx)
        if ctx.commits:
            shadow.keys.append(rotated_k)
            shadow.values.append(values)
            shadow.slots.append(torch.full(rotated_k.shape[:2], -1))
            shadow.keys, shadow.values, shadow.slots = ([torch.cat(parts, 1)] for parts in (shadow.keys, shadow.values, shadow.slots))
        return out

    def _follow(self, layer: int, frame: int, went: Ingested) -> None:
        """A frame entered the history: evicted groups lose their tokens, the frame's tokens get theirs."""
        slots = self.shadows[layer].slots[0]
        tokens = self.run.geometry.tokens_per_frame
        if went.fold is not None:
            moved = went.fold.remap(slots.clamp_min(0)[None], went.opened.shape[-1])[0] if went.opened.shape[1] == len(slots) else \
                went.fold.remap(slots.clamp_min(0).flatten()[None, None], went.opened.shape[-1])[0, 0].view_as(slots)
            slots.copy_(torch.where(slots >= 0, moved, slots))
        opened = went.opened[0].expand(len(slots), -1)
        lost = torch.gather(opened, 1, slots.clamp_min(0)) & (slots >= 0)
        slots[lost] = -2
        slots[:, frame * tokens:(frame + 1) * tokens] = went.slot[0].expand(len(slots), -1)

    def _seen(self, layer: int, ctx: FwdCtx) -> tuple[torch.Tensor, torch.Tensor | None, list[int], int]:
        """Keys [H, n, D] the call really sees, their bias, the pinned frames (in order) and the number of history rows."""
        policy = self.policy()
        tokens = self.run.geometry.tokens_per_frame
        if isinstance(policy, TempCache):
            store = policy.stores(layer)[0]
            pinned = policy.ledger.frames
            start = len(pinned) * tokens + (0 if store.packed else store.bound)
            own = slice(start, start + ctx.num_frames * tokens)
            keys, _, bias = store.visible(len(pinned), own, policy.tables)
            return keys[0], None if bias is None else bias[0], list(pinned), store.bound
        assert isinstance(policy, FrameCache)
        frames = [f for f in policy.visible_frames(ctx.start, ctx.num_frames) if f < ctx.start]
        keys = self.shadows[layer].keys[0] if frames else None
        rows = [keys[:, f * tokens:(f + 1) * tokens] for f in frames] if keys is not None else []
        return torch.cat(rows, 1) if rows else torch.empty(0), None, frames, 0

    def _measure(self, layer: int, queries: tuple[torch.Tensor, torch.Tensor], own_k: torch.Tensor, own_v: torch.Tensor,
                 out: torch.Tensor, ctx: FwdCtx) -> None:
        tokens, shadow = self.run.geometry.tokens_per_frame, self.shadows[layer]
        generator = torch.Generator().manual_seed(1000 * ctx.block + 10 * layer + ctx.step)
        chosen = torch.randint(queries[0].shape[1], (QUERIES,), generator=generator)
        some, placed = (q[:, chosen] for q in queries)
        past = shadow.keys[0].shape[1]
        dense = _softmax(some, torch.cat([shadow.keys[0], own_k], 1), None)
        truth = dense @ torch.cat([shadow.values[0], own_v], 1)
        error = float((out[:, chosen] - truth).norm() / truth.norm())
        keys, bias, pinned, history = self._seen(layer, ctx)
        visible = len(pinned) * tokens + history + own_k.shape[1]
        self.pairs[ctx.block][0] += visible
        self.pairs[ctx.block][1] += past + own_k.shape[1]
        at = torch.cat([torch.arange(f * tokens, (f + 1) * tokens) for f in pinned]) if pinned else torch.empty(0, dtype=torch.long)
        if isinstance(self.policy(), TempCache):
            everything, hist, mass = self._merged(dense, _softmax(placed, keys, bias), at, history, shadow, past)
        else:
            everything, hist, mass = self._dropped(dense, at, past, ctx)
        self.samples.append(Sample(ctx.block, everything, hist, mass, error))

    def _merged(self, dense: torch.Tensor, seen: torch.Tensor, at: torch.Tensor, history: int, shadow: Shadow,
                past: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        groups = torch.where(shadow.slots[0] < 0, history, shadow.slots[0])  # the last group takes what was evicted
        inside = torch.ones(past, dtype=torch.bool)
        inside[at] = False
        mass = torch.where(inside, dense[..., :past], 0)
        true = torch.zeros(*dense.shape[:2], history + 1).scatter_add_(2, groups[:, None].expand(-1, dense.shape[1], -1), mass)
        got = torch.nn.functional.pad(seen[..., len(at):len(at) + history], (0, 1))
        moved = (dense[..., at] - seen[..., :len(at)]).abs().sum(-1) + (dense[..., past:] - seen[..., len(at) + history:]).abs().sum(-1)
        everything = 1 - (moved + (true - got).abs().sum(-1)) / 2
        total, shown = true.sum(-1, keepdim=True), got.sum(-1, keepdim=True)
        hist = 1 - (true / total.clamp_min(1e-12) - got / shown.clamp_min(1e-12)).abs().sum(-1) / 2
        return everything.mean(1), hist.mean(1), total.mean((1, 2))

    def _dropped(self, dense: torch.Tensor, at: torch.Tensor, past: int, ctx: FwdCtx) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, settings = self.run.geometry.tokens_per_frame, self.run.settings
        visible = torch.zeros(dense.shape[-1], dtype=torch.bool)
        visible[at] = True
        visible[past:] = True
        history = torch.zeros_like(visible)
        history[settings.sink_frames * tokens:(ctx.start - ctx.num_frames) * tokens] = True
        total = dense[..., history].sum(-1)
        hist = dense[..., history & visible].sum(-1) / total.clamp_min(1e-12)
        return dense[..., visible].sum(-1).mean(1), hist.mean(1), total.mean(1)

    def result(self, last_blocks: int = 10) -> dict[str, float]:
        """Means and 5th percentiles over heads, density over the last blocks."""
        everything, history = (torch.cat([getattr(s, name) for s in self.samples]) for name in ("everything", "history"))
        blocks = sorted(self.pairs)[-last_blocks:]
        density = sum(self.pairs[b][0] / self.pairs[b][1] for b in blocks) / len(blocks)
        return {"recall": float(everything.mean()), "recall_p5": float(everything.quantile(0.05)),
                "history_recall": float(history.mean()), "history_recall_p5": float(history.quantile(0.05)),
                "history_mass": float(torch.cat([s.history_mass for s in self.samples]).mean()),
                "error": sum(s.error for s in self.samples) / len(self.samples), "density": density}


def _softmax(q: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    scores = q @ keys.transpose(1, 2) / q.shape[-1] ** 0.5
    return (scores if bias is None else scores + bias[:, None]).softmax(-1)
