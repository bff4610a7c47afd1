"""Denoise calls leave no trace, one block can be undone exactly, runs and branches do not touch each other."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from core.engine_tools import FULL, SCHEDULE, Probe, Rollout, random_qkv, window
from fastar_pack.fastar_core.context import Phase
from fastar_pack.fastar_core.drivers.blockwise import run_blockwise
from fastar_pack.fastar_core.errors import GeometryError
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.policies.frame_cache import FrameCache
from fastar_pack.fastar_core.positions import RopeSpec

pytestmark = pytest.mark.cpu
ALL = [FULL, window(6), window(8, 3), window(8, 3, positions="slot"), window(1)]


class Feed(Probe):
    """A probe that is fed random q, k, v which depend on the call alone."""

    def __init__(self, settings: PolicySettings, total: int = 24, block: int = 3, branch: str = "p") -> None:
        super().__init__(settings, total, block, 2, 3)
        self.run.rope = RopeSpec(24)
        self.branch = branch

    def feed(self, phase: Phase, start: int, count: int, seed: int) -> Tensor:
        ctx = self.ctx(phase, start, count)
        self.run.begin(ctx)
        out = self.outputs(phase, start, count, seed)
        self.run.end()
        return out

    def outputs(self, phase: Phase, start: int, count: int, seed: int) -> Tensor:
        policy = self.run.policy(self.branch)
        ctx = self.ctx(phase, start, count)
        outs = [policy.attend(layer, *random_qkv(100 * start + 10 * seed + layer, 6 * count), ctx) for layer in range(2)]
        return torch.stack(outs)

    def committed(self, upto: int) -> None:
        for start in range(0, upto, self.geometry.block):
            self.feed("denoise", start, self.geometry.block, 1)
            self.feed("clean", start, self.geometry.block, 2)


def store(policy: FrameCache) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """(layer, frame) -> copies of the stored rows of every committed frame."""
    rows = {}
    for layer, keys in policy._keys.items():
        for slot, frame in enumerate(policy.frames):
            if frame is not None and frame < policy.end:
                span = policy._span(slot)
                rows[layer, frame] = (keys[:, span].clone(), policy._values[layer][:, span].clone())
    return rows


def equal(a: dict[tuple[int, int], tuple[Tensor, Tensor]], b: dict[tuple[int, int], tuple[Tensor, Tensor]]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, y) for key in a for x, y in zip(a[key], b[key]))


def block_for(settings: PolicySettings) -> int:
    return 1 if settings.window_frames == 1 else 3


@pytest.mark.parametrize("settings", ALL)
@pytest.mark.parametrize("upto", [0, 3, 6, 12])
def test_denoise_calls_leave_the_store_as_it_was(settings: PolicySettings, upto: int) -> None:
    feed, n = Feed(settings, block=block_for(settings)), block_for(settings)
    feed.committed(upto)
    before = store(feed.policy) if upto else {}
    outs = [feed.feed("denoise", upto, n, seed) for seed in (1, 1, 7, 1)]
    assert torch.equal(outs[0], outs[1]), "the same step again gives the same output"
    assert torch.equal(outs[0], outs[3]), "a step in between changes nothing"
    assert not torch.equal(outs[0], outs[2])
    during = store(feed.policy)
    assert equal(during, {key: before[key] for key in during}), "frames still visible are untouched"
    feed.policy.rollback(upto)
    assert equal(store(feed.policy), before), "frames that made room for the block come back"


@pytest.mark.parametrize("settings", ALL)
@pytest.mark.parametrize("upto", [0, 3, 6, 12])
def test_a_block_rolled_back_and_replayed_is_equal_bit_for_bit(settings: PolicySettings, upto: int) -> None:
    feed, n = Feed(settings, block=block_for(settings)), block_for(settings)
    feed.committed(upto)
    before = store(feed.policy) if upto else {}

    def play() -> tuple[Tensor, Tensor]:
        return feed.feed("denoise", upto, n, 1), feed.feed("clean", upto, n, 2)

    first = play()
    after = store(feed.policy)
    assert feed.policy.committed_frames()[-1] == upto + n - 1
    feed.policy.rollback(upto)
    assert equal(store(feed.policy), before)
    feed.feed("denoise", upto, n, 5)  # something else is tried in between
    feed.policy.rollback(upto)
    again = play()
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert equal(store(feed.policy), after)
    following = feed.feed("denoise", upto + n, n, 1)
    other = Feed(settings, block=n)
    other.committed(upto + n)
    assert torch.equal(other.feed("denoise", upto + n, n, 1), following)


def test_without_saved_rows_a_rollback_would_be_noticed() -> None:
    feed = Feed(window(6))
    feed.committed(9)
    before = store(feed.policy)
    feed.feed("denoise", 9, 3, 1)
    feed.policy._undo.rows.clear()
    feed.policy.rollback(9)
    assert not equal(store(feed.policy), before)


@pytest.mark.parametrize("settings", [FULL, window(6)])
def test_only_the_last_block_can_be_undone(settings: PolicySettings) -> None:
    feed = Feed(settings)
    feed.committed(9)
    with pytest.raises(GeometryError, match="latent frame 3: the cache can undo the block at latent frame 6"):
        feed.policy.rollback(3)
    feed.policy.rollback(6)
    with pytest.raises(GeometryError, match="the cache can undo nothing"):
        feed.policy.rollback(6)
    assert feed.policy.end == 6


@pytest.mark.parametrize("settings", [FULL, window(6), window(9, 3)])
@pytest.mark.parametrize("counts", [(3, 1), (1, 3), (2, 3)])
def test_a_call_of_another_length_sees_nothing_of_the_abandoned_one(settings: PolicySettings, counts: tuple[int, int]) -> None:
    feed, fresh = Feed(settings), Feed(settings)
    for one in (feed, fresh):
        one.committed(12)
    feed.feed("denoise", 12, counts[0], 1)
    assert torch.equal(feed.feed("denoise", 12, counts[1], 2), fresh.feed("denoise", 12, counts[1], 2))
    assert equal(store(feed.policy), store(fresh.policy))


def test_interleaved_runs_equal_each_alone() -> None:
    def rollouts() -> list[Rollout]:
        return [
            Rollout((1, 4, 9, 8, 12), 3, window(6, 1), seed=1),
            Rollout((2, 4, 7, 9, 14), 1, FULL, prefix=1, seed=2),
            Rollout((1, 4, 9, 8, 12), 3, FULL, seed=3),
        ]

    alone = [torch.cat([d.latent for d in run_blockwise(r.call, r.plan)], 2) for r in rollouts()]
    together = rollouts()
    running: list[Iterator] = [run_blockwise(r.call, r.plan) for r in together]
    parts: list[list[Tensor]] = [[] for _ in together]
    while any(running):
        for i, run in enumerate(running):
            done = next(run, None) if run is not None else None
            if done is None:
                running[i] = None  # type: ignore[call-overload]
            else:
                parts[i].append(done.latent)
    assert all(torch.equal(torch.cat(p, 2), a) for p, a in zip(parts, alone))


def test_branches_do_not_touch_each_other() -> None:
    """Two branches in one call, one only from time to time present, equal runs of one branch each."""
    both = Feed(window(6, 1))
    alone = {"p": Feed(window(6, 1)), "n": Feed(window(6, 1), branch="n")}
    for start in range(0, 15, 3):
        for phase, seed in (("denoise", 1), ("clean", 2)):
            ctx = both.ctx(phase, start, 3)  # type: ignore[arg-type]
            both.run.begin(ctx)
            for branch in ("p", "n") if start % 2 else ("n", "p"):
                both.branch = branch
                got = both.outputs(phase, start, 3, seed + 3 * (branch == "n"))  # type: ignore[arg-type]
                want = alone[branch].feed(phase, start, 3, seed + 3 * (branch == "n"))  # type: ignore[arg-type]
                assert torch.equal(got, want)
            both.run.end()
    assert both.run.report()["branches"] == 2
    assert both.run.bytes() == sum(f.run.bytes() for f in alone.values())


def held_bytes(owner: object) -> int:
    """Bytes of all tensors that can be reached from an object, every storage once; the run's own objects only."""
    seen, todo, storages = set(), [owner], {}
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
        elif isinstance(thing, (dict, list, tuple, set)) or type(thing).__module__.startswith("fastar_pack"):
            todo += gc.get_referents(thing)
    return sum(storages.values())


@pytest.mark.parametrize("settings", ALL)
def test_bytes_are_true_and_flat(settings: PolicySettings) -> None:
    n = block_for(settings)
    feed, sizes = Feed(settings, block=n), []
    for start in range(0, 24, n):
        feed.feed("denoise", start, n, 1)
        feed.feed("clean", start, n, 2)
        sizes.append(feed.policy.bytes())
        assert held_bytes(feed.policy) == sizes[-1]
    assert len(set(sizes[4:])) == 1, f"the cache grows: {sizes}"
    cached = 2 * 2 * feed.policy.capacity * 6 * 2 * 24 * 4  # keys and values, layers, frames, tokens, heads, width, float32
    assert cached <= sizes[-1] <= cached * (1 + n / feed.policy.capacity) + 2**14
    feed.run.close()
    assert feed.run.bytes() == 0


def test_a_long_run_holds_no_more_than_a_short_one() -> None:
    def peak(frames: int) -> object:
        rollout = Rollout((1, 4, frames, 8, 12), 3, window(6), schedule=SCHEDULE)
        rollout.run()
        return rollout.engine.run.report()["cache_peak_bytes"]

    assert peak(12) == peak(24) > 0
