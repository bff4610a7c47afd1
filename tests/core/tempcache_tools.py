"""TempCache without a model: frames of made-up queries, keys and values, and a plain record of who joined which group."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fastar_pack.fastar_core.context import FwdCtx, Phase
from fastar_pack.fastar_core.geometry import RunGeometry
from fastar_pack.fastar_core.noise import seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.positions import RopeSpec, Rotary
from fastar_pack.fastar_core.runstate import RunState
from fastar_pack.fastar_core.tempcache.policy import TempCache
from fastar_pack.fastar_core.tempcache.pool import HistoryPool, Ingested
from fastar_pack.fastar_core.tempcache.rows import MeanRows
from fastar_pack.fastar_core.tempcache.settings import TempCacheSettings
from fastar_pack.fastar_core.tempcache.store import LayerStore

Make = Callable[[str, int, int], Tensor]
"""(phase, frame, layer) -> q, k, v [3, B, S, H, D] of one frame."""


def tc(sink: int = 1, recache: str = "keep", **settings: Any) -> PolicySettings:
    return PolicySettings("tempcache", sink_frames=sink, recache=recache, tempcache=TempCacheSettings(**settings))  # type: ignore[arg-type]


def similar_frames(batch: int, tokens: int, heads: int, dim: int, seed: int = 0, spread: float = 0.3, period: int = 7) -> Make:
    """Frames that come back every ``period`` with a little change, so that some tokens match and some do not."""
    def make(phase: str, frame: int, layer: int) -> Tensor:
        base = seeded_normal(1000 * seed + 10 * (frame % period) + layer, (3, batch, tokens, heads, dim))
        own = seeded_normal(77 + 1000 * frame + 10 * layer + seed + (5 if phase == "denoise" else 0), (3, batch, tokens, heads, dim))
        return base + spread * own
    return make


@dataclass
class Synthetic:
    """One run of any cache policy over made-up frames; ``outputs`` holds what each call attended to, [layers, B, N, H, D]."""

    settings: PolicySettings
    total: int = 60
    block: int = 3
    rows: int = 2
    cols: int = 3
    heads: int = 2
    dim: int = 24
    layers: int = 2
    batch: int = 1
    call_frames: int = 0
    dtype: torch.dtype = torch.float32
    scale_t: float = 1.0
    scale_yx: float = 1.0
    make: Make | None = None
    outputs: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        geometry = RunGeometry(self.total, self.block, self.rows, self.cols, self.layers, self.call_frames)
        self.rope = RopeSpec(self.dim, scales=(self.scale_t, self.scale_yx, self.scale_yx))
        self.run = RunState(self.settings, geometry, self.rope)
        self.tokens = self.rows * self.cols
        self.make = self.make or similar_frames(self.batch, self.tokens, self.heads, self.dim)

    def qkv(self, phase: str, start: int, count: int, layer: int) -> list[Tensor]:
        assert self.make is not None
        made = torch.cat([self.make(phase, f, layer) for f in range(start, start + count)], 2)
        return [t.to(self.dtype) for t in made]

    def ctx(self, phase: Phase, start: int, count: int) -> FwdCtx:
        return FwdCtx(phase, start, count, (0.5,) * count, (500.0,) * count, self.rows, self.cols)

    def call(self, phase: Phase, start: int, count: int, branch: str = "p") -> Tensor:
        ctx = self.ctx(phase, start, count)
        self.run.begin(ctx)
        policy = self.run.policy(branch)
        out = torch.stack([policy.attend(layer, *self.qkv(phase, start, count, layer), ctx) for layer in range(self.layers)])
        self.run.end()
        self.outputs.append(out)
        return out

    def go(self, upto: int, start: int = 0, branch: str = "p") -> Synthetic:
        """Blocks of a denoise call and a clean pass."""
        for at in range(start, upto, self.block):
            count = min(self.block, upto - at)
            self.call("denoise", at, count, branch)
            self.call("clean", at, count, branch)
        return self

    @property
    def policy(self) -> TempCache:
        policy = self.run._policies["p"]
        assert isinstance(policy, TempCache)
        return policy

    def store(self, layer: int = 0) -> LayerStore:
        return self.policy.stores(layer)[0]

    def pool(self, layer: int = 0) -> HistoryPool:
        pool = self.store(layer).pool
        assert pool is not None
        return pool

    def blocks(self) -> list[dict[str, Any]]:
        found = self.policy.report()["blocks"]
        assert isinstance(found, list)
        return found


def state(policy: TempCache) -> list[Tensor]:
    """Everything committed: pinned rows, and of the history what is occupied (a call's own rows lie in the free ones)."""
    kept: list[Tensor] = [torch.tensor(policy.ledger.frames), torch.tensor(policy.ledger.end)]
    for layer in range(len(policy._stores)):
        for store in policy.stores(layer):
            filled = len(policy.ledger.frames) * store.sizes.tokens
            kept += [t[:, :, :filled].clone() for t in (store.keys, store.values, store.home)]
            kept += [torch.tensor(store.bound), torch.tensor(store.biased)]
            if store.moment is not None and store.moment.moment is not None:
                kept.append(store.moment.moment.clone())
            if store.pool is None:
                continue
            used = store.pool.count > 0
            for tensor in store.pool.tensors():
                mask = used if tensor.ndim == 3 else used[..., None]
                same = tensor.shape[2] == used.shape[2]
                kept.append(tensor.masked_fill(~mask, 0) if same and store.pool.last_slots is not tensor else tensor.clone())
    return kept


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


class Followed(Synthetic):
    """Also keeps, per layer, batch row and group of heads, the tokens (frame, cell) of every history row, as a plain list."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.members: dict[tuple[int, int, int, int], list[tuple[int, int]]] = {}
        self.evictions: list[tuple[int, int, int, int]] = []

    def call(self, phase: Phase, start: int, count: int, branch: str = "p") -> Tensor:
        known = branch in self.run._policies
        if known:
            for layer in range(self.layers):
                self.store(layer).watch = lambda frame, went, at=layer: self._follow(at, frame, went)
        return super().call(phase, start, count, branch)

    def _follow(self, layer: int, frame: int, went: Ingested) -> None:
        for b, per_group in enumerate(went.slot.tolist()):
            for g, slots in enumerate(per_group):
                self._fold(layer, b, g, went)
                for slot in went.opened[b, g].nonzero().flatten().tolist():
                    if (layer, b, g, slot) in self.members:
                        self.evictions.append((layer, b, g, slot))
                    self.members[layer, b, g, slot] = []
                for cell, slot in enumerate(slots):
                    self.members[layer, b, g, slot].append((frame, cell))

    def _fold(self, layer: int, b: int, g: int, went: Ingested) -> None:
        """Groups that joined others brought their members."""
        if went.fold is None:
            return
        for at in went.fold.done[b, g].nonzero().flatten().tolist():
            victim, target = int(went.fold.victim[b, g, at]), int(went.fold.target[b, g, at])
            self.members[layer, b, g, target] += self.members.pop((layer, b, g, victim))

    def expected(self, start: int, count: int, layer: int, bias: bool = True) -> Tensor:
        """Attention [B, N, H, D] of a denoise call, from the members' own keys and values and nothing the cache stores."""
        settings, policy = self.policy.settings, self.policy
        rotary = Rotary(self.rope, self.rows, self.cols)
        q, own_k, own_v = self.qkv("denoise", start, count, layer)
        clean = {f: self.qkv("clean", f, 1, layer) for f in range(start)}
        at = range(start, start + count)
        q, own_k = rotary.rotate(q, at), rotary.rotate(own_k, at)
        pinned = policy.ledger.frames
        groups = 1 if settings.shared else self.heads
        out = torch.zeros_like(q)
        for b in range(self.batch):
            for h in range(self.heads):
                keys = [rotary.rotate(clean[f][1], [f])[b, :, h] for f in pinned] + [own_k[b, :, h]]
                values = [clean[f][2][b, :, h] for f in pinned] + [own_v[b, :, h]]
                log_m = [torch.zeros(sum(len(k) for k in keys))]
                for (at_layer, at_b, g, _), members in self.members.items():
                    if (at_layer, at_b, g) == (layer, b, h if groups > 1 else 0):
                        key, value = self._group(settings, rotary, clean, members, b, h)
                        keys.append(key[None])
                        values.append(value[None])
                        log_m.append(torch.tensor([float(len(members))]).log() * bias)
                scores = q[b, :, h] @ torch.cat(keys).T / self.dim**0.5 + torch.cat(log_m)
                out[b, :, h] = scores.softmax(-1) @ torch.cat(values)
        return out

    def _group(self, settings: TempCacheSettings, rotary: Rotary, clean: dict[int, list[Tensor]], members: list[tuple[int, int]],
               b: int, h: int) -> tuple[Tensor, Tensor]:
        def key(member: tuple[int, int], turned: bool) -> Tensor:
            frame, cell = member
            whole = rotary.rotate(clean[frame][1], [frame]) if turned else clean[frame][1]
            return whole[b, cell, h].double()

        value = torch.stack([clean[f][2][b, c, h].double() for f, c in members]).mean(0).float()
        if settings.representative == "last":
            return key(members[-1], True).float(), value
        assert settings.representative == "mean"
        mean = torch.stack([key(m, settings.space == "post") for m in members]).mean(0).float()
        if settings.space == "pre":
            frame, cell = members[-1]
            row = torch.zeros(1, self.tokens, 1, self.dim)
            row[0, cell, 0] = mean
            mean = rotary.rotate(row, [frame])[0, cell, 0]
        return mean, value


def pool_of(settings: TempCacheSettings, capacity: int, heads: int = 2, dim: int = 24, rows: int = 2, cols: int = 3,
            batch: int = 1, dtype: torch.dtype = torch.float32) -> HistoryPool:
    """A pool alone."""
    like = torch.zeros(batch, heads, capacity, dim, dtype=dtype)
    return HistoryPool(MeanRows(like.clone()), MeanRows(like.clone()), like, rows, cols, settings)


def settings_of(**changes: Any) -> TempCacheSettings:
    found = tc(budget_frames=99, **changes).tempcache
    assert found is not None
    return found


def distinct(number: int, heads: int = 2, dim: int = 24) -> Tensor:
    key = torch.zeros(heads, dim)
    key[:, number % dim] = 1
    return key
