"""sink_window shows attention exactly the frames of the reference samplers, at their positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core.engine_tools import FULL, ListCache, Probe, Rollout, random_qkv, window
from fastar_pack.fastar_core.errors import ConfigError, FastARError, GeometryError
from fastar_pack.fastar_core.geometry import plan_blocks
from fastar_pack.fastar_core.policies import PolicySettings, make_policy
from fastar_pack.fastar_core.positions import RopeSpec
from fastar_pack.fastar_core.runstate import RunState

pytestmark = pytest.mark.cpu


def spans(*pairs: tuple[int, int]) -> tuple[int, ...]:
    return tuple(f for first, last in pairs for f in range(first, last + 1))


TABLE_9_0 = {0: spans((0, 2)), 3: spans((0, 5)), 6: spans((0, 8)), 9: spans((3, 11)), 12: spans((6, 14))}
TABLE_12_3 = {9: spans((0, 11)), 12: spans((0, 2), (6, 14)), 15: spans((0, 2), (9, 17))}


@pytest.mark.parametrize(("settings", "table"), [(window(9), TABLE_9_0), (window(12, 3), TABLE_12_3)])
def test_frame_tables_of_the_reference(settings: PolicySettings, table: dict[int, tuple[int, ...]]) -> None:
    size, sink = settings.window_frames or 0, settings.sink_frames
    total = sink + 5 * size + 3
    probe = Probe(settings, total, 3)
    seen = {b.start: probe.block(b.start, b.num_frames) for b in plan_blocks(total, 3)}
    assert {start: seen[start] for start in table} == table
    for start in range(size, total - 2, 3):  # steady state: the sink and the newest frames, own block last
        assert seen[start] == spans((0, sink - 1), (start + 3 - (size - sink), start + 2))


@pytest.mark.parametrize("wrong", [window(9, 3), window(15, 3), window(12, 0), window(11, 3), FULL])
def test_another_window_does_not_reproduce_the_table(wrong: PolicySettings) -> None:
    seen = [Probe(wrong, 18, 3).advance(plan_blocks(18, 3))[i] for i in (3, 4, 5)]
    assert seen != list(TABLE_12_3.values())


def combinations() -> list[tuple[int, int, int]]:
    """(window, sink, block), windows from the smallest possible (sink + block, so 1 and 2 for block 1) on."""
    return [(sink + block + extra, sink, block) for block in (1, 2, 3, 4) for sink in (0, 1, 3, 4) for extra in (0, 1, 2, 5)]


@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_what_attention_saw_is_what_visible_frames_says(block: int) -> None:
    for size, sink, _ in [c for c in combinations() if c[2] == block]:
        total = sink + 5 * size + 1
        probe, reference = Probe(window(size, sink), total, block), ListCache(size, sink, 1, 2)
        for b in plan_blocks(total, block):
            seen = probe.block(b.start, b.num_frames)
            assert seen == tuple(reference.see(b.start, b.num_frames)), (size, sink, b)
            assert seen == probe.policy.visible_frames(b.start, b.num_frames), (size, sink, b)
            reference.commit(b.start, b.num_frames)


def test_smallest_windows() -> None:
    assert Probe(window(1), 6, 1).advance(plan_blocks(6, 1)) == [(f,) for f in range(6)]
    assert Probe(window(2), 6, 1).advance(plan_blocks(6, 1)) == [(0,), *((f - 1, f) for f in range(1, 6))]
    assert Probe(window(2, 1), 6, 1).advance(plan_blocks(6, 1)) == [(0,), *((0, f) for f in range(1, 6))]
    assert Probe(window(6, 3), 12, 3).advance(plan_blocks(12, 3)) == [
        spans((0, 2)),
        spans((0, 5)),
        spans((0, 2), (6, 8)),
        spans((0, 2), (9, 11)),
    ]


@pytest.mark.parametrize("prefix", [1, 3, 7])
def test_a_prefix_fills_the_window_like_generated_frames(prefix: int) -> None:
    probe, reference = Probe(window(6, 1), 20, 3), ListCache(6, 1, 1, 2)
    for start in range(0, prefix, 3):
        count = min(3, prefix - start)
        assert probe.call("prefill", start, count) == tuple(reference.see(start, count))
        reference.commit(start, count)
    for b in plan_blocks(20, 3, prefix):
        assert probe.block(b.start, b.num_frames) == tuple(reference.see(b.start, b.num_frames))
        reference.commit(b.start, b.num_frames)


def worst_difference(settings: PolicySettings, reference: ListCache, total: int, block: int) -> float:
    """Policy against the list of frames on random q, k, v (2 x 3 tokens, batch 2), every denoise and clean call."""
    probe = Probe(settings, total, block, 2, 3)
    probe.run.rope = RopeSpec(24)
    worst = 0.0
    for b in plan_blocks(total, block):
        for phase in ("denoise", "clean"):
            ctx = probe.ctx(phase, b.start, b.num_frames)
            probe.run.begin(ctx)
            for layer in range(2):
                q, k, v = random_qkv(1000 * b.start + 10 * layer + (phase == "clean"), 6 * b.num_frames, batch=2)
                got = probe.run.policy("p").attend(layer, q, k, v, ctx)
                want = reference.attend(layer, q, k, v, b.start, phase == "clean")
                worst = max(worst, float((got - want).abs().max()))
            probe.run.end()
        reference.commit(b.start, b.num_frames)
    return worst


@pytest.mark.parametrize("slot", [False, True])
@pytest.mark.parametrize(("size", "sink", "block"), [(6, 3, 3), (8, 3, 3), (7, 0, 4), (2, 1, 1), (5, 2, 1)])
def test_values_and_positions_equal_the_list_of_frames(size: int, sink: int, block: int, slot: bool) -> None:
    settings = window(size, sink, positions="slot" if slot else "absolute")
    assert worst_difference(settings, ListCache(size, sink, 2, 3, slot), sink + 3 * size + 1, block) <= 1e-5


@pytest.mark.parametrize(
    ("settings", "slot"), [(window(8, 3), True), (window(8, 3, positions="slot"), False), (window(8, 0), False), (window(9, 3), False)]
)
def test_a_wrong_position_or_window_rule_is_noticed(settings: PolicySettings, slot: bool) -> None:
    assert worst_difference(settings, ListCache(8, 3, 2, 3, slot), 25, 3) > 1e-2


def outputs(settings: PolicySettings, frames: int) -> torch.Tensor:
    return Rollout((1, 4, frames, 8, 12), 3, settings).run()


def test_window_equals_full_until_the_first_eviction() -> None:
    assert torch.equal(outputs(FULL, 6), outputs(window(6, 3), 6))
    longer = outputs(window(6, 3), 9)
    full = outputs(FULL, 9)
    assert torch.equal(longer[:, :, :6], full[:, :, :6])
    assert (longer[:, :, 6:] - full[:, :, 6:]).abs().max() > 1e-2


def test_slot_positions_are_absolute_while_nothing_was_evicted() -> None:
    slot, absolute = window(9, 3, positions="slot"), window(9, 3)
    assert (outputs(slot, 9) - outputs(absolute, 9)).abs().max() <= 1e-5
    assert (outputs(slot, 15) - outputs(absolute, 15)).abs().max() > 1e-2


def test_slot_positions_are_absolute_for_ever_without_a_sink() -> None:
    assert (outputs(window(6, positions="slot"), 18) - outputs(window(6), 18)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("settings", "block", "words"),
    [
        (PolicySettings("sink_window"), 3, "window_frames"),
        (window(5, 3), 3, "raise window_frames to 6"),
        (window(2), 3, "raise window_frames to 3"),
        (window(0), 1, "raise window_frames to 1"),
        (window(6, -1), 3, "sink_frames is -1"),
        (replace(window(6), kind="ring"), 3, "'ring' is unknown"),
        (replace(window(6), positions="relative"), 3, "'relative' is unknown"),
        (replace(window(6), recache="maybe"), 3, "'maybe' is unknown"),
    ],
)
def test_impossible_settings_are_refused_by_name(settings: PolicySettings, block: int, words: str) -> None:
    geometry = Probe(FULL, 20, block).geometry
    with pytest.raises(ConfigError, match=words):
        make_policy(settings, geometry, RopeSpec(24), RunState(FULL, geometry, RopeSpec(24)).attention)


def test_head_sizes_that_cannot_be_rotated_are_refused() -> None:
    for head_dim in (13, 5, 4):
        with pytest.raises(GeometryError, match=f"head dim {head_dim}"):
            RopeSpec(head_dim).axes()


@pytest.mark.parametrize("settings", [FULL, window(9, 3)])
def test_calls_out_of_order_are_refused(settings: PolicySettings) -> None:
    probe = Probe(settings, 20, 3)
    probe.block(0, 3)
    with pytest.raises(GeometryError, match="starts at latent frame 6, but 3 frames"):
        probe.call("denoise", 6, 3)
    with pytest.raises(GeometryError, match="starts at latent frame 0"):
        probe.call("clean", 0, 3)
    with pytest.raises(GeometryError, match="last committed latent frame 3, not 2"):
        probe.call("recache", 0, 2)
    with pytest.raises(FastARError, match=r"do(es)? not fit"):
        probe.call("denoise", 3, 21)


def test_attend_without_begin_is_refused() -> None:
    probe = Probe(FULL, 20, 3)
    probe.block(0, 3)
    q, k, v = random_qkv(0, 6, head_dim=64)
    with pytest.raises(GeometryError, match="without begin"):
        probe.policy.attend(0, q, k, v, probe.ctx("denoise", 3, 3))


def test_the_last_block_may_be_shorter_and_sees_more_history() -> None:
    probe = Probe(window(9, 3), 19, 3)
    seen = probe.advance(plan_blocks(19, 3))
    assert seen[-1] == spans((0, 2), (13, 18))
    assert seen[-2] == spans((0, 2), (12, 17))
