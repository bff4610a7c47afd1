"""Rolling-Forcing: which frames attention sees, where they stand, who wrote them, and in which order calls are made."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from core.sight import Seen, Sight, sight, span
from fastar_pack.fastar_core.drivers import longest_call, num_model_calls
from fastar_pack.fastar_core.errors import GeometryError
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.sigmas import warp

pytestmark = pytest.mark.cpu
STOCK = PolicySettings("rolling", 21, 3)
FREE = PolicySettings("rolling", None, 3)
SMALL = PolicySettings("rolling", 12, 3)
FIVE, FOUR = warp((1000, 800, 600, 400, 200), 5.0), warp((1000, 750, 500, 250), 5.0)
TWO = FIVE[:2]
# (start, frames of the window) -> (old frames seen, where the anchor stands); backbones 3.3, 5 levels, 16 blocks
WINDOWS = {
    (0, 3): ((), None), (0, 6): ((), None), (0, 9): ((), None), (0, 12): ((), None), (0, 15): ((), None),
    (3, 15): (span(0, 2), 0), (6, 15): (span(0, 5), 0), (9, 15): (span(0, 2) + span(6, 8), 3),
    (12, 15): (span(0, 2) + span(9, 11), 6), (33, 15): (span(0, 2) + span(30, 32), 27),
    (36, 12): (span(0, 2) + span(30, 35), 27), (39, 9): (span(0, 2) + span(30, 38), 27),
    (42, 6): (span(0, 2) + span(30, 41), 27), (45, 3): (span(0, 2) + span(30, 44), 27),
}
CLEAN = {0: (), 3: span(0, 2), 12: span(0, 11), 18: span(0, 17), 21: span(3, 20), 24: span(6, 23), 42: span(24, 41)}


def rolling(settings: PolicySettings, frames: int, sigmas: tuple[float, ...] = FIVE, **changes: object) -> Sight:
    return sight(settings, frames, sigmas, "rolling", **changes)  # type: ignore[arg-type]


def anchor_start(one: Seen, sink: int = 3) -> int | None:
    found = [key.position for key in one.keys if key.frame < min(sink, one.ctx.start)]
    assert found == list(range(found[0], found[0] + len(found))) if found else True
    return found[0] if found else None


def windows_of(run: Sight) -> dict[tuple[int, int], tuple[tuple[int, ...], int | None]]:
    return {(one.ctx.start, one.ctx.num_frames): (one.old, anchor_start(one)) for one in run.of("denoise")}


@pytest.fixture(scope="module")
def stock() -> Sight:
    return rolling(STOCK, 48)


def test_windows_see_anchor_working_and_themselves(stock: Sight) -> None:
    found = windows_of(stock)
    assert {key: found[key] for key in WINDOWS} == WINDOWS
    assert all(len(one.frames) <= 21 for one in stock.seen)


def test_everything_but_the_anchor_stands_at_its_own_number(stock: Sight) -> None:
    for one in stock.seen:
        assert one.queries == tuple(range(one.ctx.start, one.ctx.end))
        assert all(key.position == key.frame for key in one.keys if key.frame >= 3 or one.ctx.phase == "clean")
        assert one.frames == one.old + one.queries, "own frames are always seen"


def test_clean_passes_see_the_last_21_and_the_anchor_only_inside_them(stock: Sight) -> None:
    found = {one.ctx.start: one.old for one in stock.of("clean")}
    assert {key: found[key] for key in CLEAN} == CLEAN


def test_old_keys_come_from_clean_passes_alone(stock: Sight) -> None:
    for one in stock.seen:
        for key in one.keys:
            writer = stock.seen[key.call].ctx
            if key.frame in one.old:
                assert writer.phase == "clean"
                assert writer.start <= key.frame < writer.end


def test_order_of_calls_and_levels(stock: Sight) -> None:
    levels = [1000 * s for s in FIVE]
    denoise = stock.of("denoise")
    assert [one.told[1:] for one in denoise] == [
        *[(0, 3 * n) for n in range(1, 5)], *[(3 * i, 15) for i in range(12)], *[(48 - 3 * n, 3 * n) for n in range(4, 0, -1)]]
    for one in denoise:
        blocks = one.ctx.num_frames // 3
        newest = 0 if one.ctx.end < 48 or one.ctx.num_frames == 15 else 5 - blocks  # ramp-down lacks the noisiest
        assert one.ctx.timesteps == tuple(t for t in reversed(levels[newest:newest + blocks]) for _ in range(3))
    passes = [("clean", 3 * i, 3) for i in range(15)]
    assert [told for told in stock.told if told[0] == "clean"] == passes, "each finished block once, the last one never"
    for i, told in enumerate(stock.told):
        if told[0] == "clean":
            assert stock.told[i - 1][:2] == ("denoise", told[1])


def test_clean_last_adds_passes_that_nobody_reads() -> None:
    plain, all_passes = rolling(STOCK, 24), rolling(STOCK, 24, clean_last=True)
    assert torch.equal(plain.out, all_passes.out)
    assert windows_of(plain) == windows_of(all_passes)
    windows = 8 + 5 - 1
    assert Counter(told[0] for told in all_passes.told) == {"denoise": windows, "clean": windows}
    assert Counter(told[0] for told in plain.told) == {"denoise": windows, "clean": 7}
    ramp_up = [one for one in all_passes.of("clean") if one.ctx.start == 0]
    assert len(ramp_up) == 5
    assert all(one.frames == (0, 1, 2) for one in ramp_up), "during ramp-up the pass sees its own frames only"
    last = max(i for i, one in enumerate(all_passes.seen) if one.told == ("clean", 0, 3))
    later = [key for one in all_passes.seen[last + 1:] for key in one.keys if key.frame < 3]
    assert later
    assert all(key.call == last for key in later), "the newest writing counts"


def test_small_window_with_eviction() -> None:
    found = windows_of(rolling(SMALL, 30, TWO))
    assert found == {(0, 3): ((), None), (0, 6): ((), None), (3, 6): (span(0, 2), 0),
                     **{(3 * i, 6): (span(0, 2) + span(3 * i - 3, 3 * i - 1), 3 * i - 6) for i in range(2, 9)},
                     (27, 3): (span(0, 2) + span(21, 26), 18)}
    clean = {one.ctx.start: one.old for one in rolling(SMALL, 30, TWO).of("clean")}
    assert clean == {3 * i: span(max(0, 3 * i - 9), 3 * i - 1) for i in range(9)}


def test_four_levels_leave_six_working_frames() -> None:
    run = rolling(STOCK, 36, FOUR)
    steady = [one for one in run.of("denoise") if one.ctx.num_frames == 12 and one.ctx.start >= 9]
    assert len(steady) == 6
    for one in steady:
        assert one.old == span(0, 2) + span(one.ctx.start - 6, one.ctx.start - 1)
        assert anchor_start(one) == one.ctx.start - 9


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_fewer_blocks_than_levels(blocks: int) -> None:
    run = rolling(STOCK, 3 * blocks)
    denoise = run.of("denoise")
    assert len(denoise) == blocks + 4
    for window, one in enumerate(denoise):
        first = max(0, window - 4)
        assert one.ctx.start == 3 * first
        levels = [window - b for b in range(first, min(blocks - 1, window) + 1)]
        assert one.ctx.timesteps == tuple(1000 * FIVE[level] for level in levels for _ in range(3))
    assert len(run.of("clean")) == blocks - 1


@pytest.mark.parametrize("batch", [1, 2])
def test_short_last_block(batch: int) -> None:
    run = rolling(STOCK, 26, batch=batch)
    assert run.out.shape == (batch, 2, 26, 2, 4)
    assert run.told[-1] == ("denoise", 24, 2)
    assert run.seen[-1].old == span(0, 2) + span(8, 23), "room 21 - 2 - 3"
    assert anchor_start(run.seen[-1]) == 5


@pytest.mark.parametrize("prefix", [3, 4, 6, 9])
def test_a_clean_prefix_is_the_oldest_history(prefix: int) -> None:
    run = rolling(STOCK, prefix + 21, prefix=prefix)
    chunks = [(s, min(3, prefix - s)) for s in range(0, prefix, 3)]
    assert run.told[:len(chunks)] == [("prefill", s, n) for s, n in chunks]
    first = run.seen[len(chunks)]
    assert first.told == ("denoise", prefix, 3)
    assert first.old == span(0, prefix - 1)
    assert [key.call for key in first.keys if key.frame < prefix] == [i for i, (_, n) in enumerate(chunks) for _ in range(n)]
    for one in run.of("denoise"):
        working = min(one.ctx.start - 3, max(0, 21 - 3 - one.ctx.num_frames))
        assert one.old == span(0, 2) + span(one.ctx.start - working, one.ctx.start - 1)
        assert anchor_start(one) == one.ctx.start - working - 3


@pytest.mark.parametrize(("window", "sink", "block", "levels"), [(9, 1, 2, 3), (10, 4, 3, 2), (7, 0, 1, 5), (12, 6, 3, 2), (8, 2, 4, 2)])
def test_other_windows_sinks_and_blocks(window: int, sink: int, block: int, levels: int) -> None:
    run = rolling(PolicySettings("rolling", window, sink), 25, FIVE[:levels], block=block)
    for one in run.of("denoise"):
        start, count = one.ctx.start, one.ctx.num_frames
        working = min(max(0, start - sink), max(0, window - count - sink))
        anchor = min(sink, start)
        assert one.old == span(0, anchor - 1) + span(start - working, start - 1)
        assert anchor_start(one, sink) == (start - working - anchor if anchor else None)
    for one in run.of("clean"):
        assert one.old == span(max(0, one.ctx.end - window), one.ctx.start - 1)


def test_extended_history_sees_everything_at_absolute_positions() -> None:
    run = rolling(FREE, 48)
    for one in run.seen:
        assert one.frames == one.positions == span(0, one.ctx.end - 1)


@pytest.mark.parametrize("wrong", [replace(STOCK, window_frames=24), replace(STOCK, window_frames=18), replace(STOCK, sink_frames=0),
                                   replace(STOCK, sink_frames=4), FREE, PolicySettings()])
def test_other_rules_do_not_reproduce_the_table(wrong: PolicySettings) -> None:
    found = windows_of(rolling(wrong, 48))
    assert {key: found[key] for key in WINDOWS} != WINDOWS


def test_visible_frames_tells_what_attention_saw() -> None:
    for settings in (STOCK, FREE, SMALL):
        run = rolling(settings, 36)
        told = run.run.policy  # built per branch during the run
        run.run.ctx = run.seen[0].ctx
        policy = told("other")
        assert all(policy.visible_frames(one.ctx.start, one.ctx.num_frames) == one.frames for one in run.of("denoise"))


@pytest.mark.parametrize("frames", [3, 5, 12, 15, 24, 26, 48])
@pytest.mark.parametrize("sigmas", [FIVE, FOUR, TWO, (1.0,)])
def test_calls_are_counted_beforehand(frames: int, sigmas: tuple[float, ...]) -> None:
    for clean_last in (False, True):
        for prefix in (0, 1):
            run = rolling(STOCK, frames, sigmas, clean_last=clean_last, prefix=prefix)
            assert num_model_calls("rolling", run.plan) == len(run.seen)
            assert longest_call("rolling", run.plan) >= max(one.ctx.num_frames for one in run.seen)


def test_the_prompt_is_that_of_the_oldest_block() -> None:
    run = rolling(STOCK, 30, prompt_at=lambda frame: int(frame >= 10))
    assert {(one.ctx.start, one.ctx.prompt_id) for one in run.seen} == {(3 * i, int(3 * i >= 10)) for i in range(10)}
    for one in run.seen:
        assert all(key.prompt == int(key.frame >= 12) for key in one.keys if key.frame in one.old)


def test_a_window_too_early_is_refused() -> None:
    run = rolling(STOCK, 12, TWO)
    with pytest.raises(GeometryError, match="starts at latent frame 15, but only 9 frames are committed"):
        run(torch.zeros(1, 2, 3, 2, 4), replace(run.seen[-1].ctx, start=15))
