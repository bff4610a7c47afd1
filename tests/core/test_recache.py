"""Prompt switch with recache, as LongLive does it: what is rewritten, what stays, and who sees whom."""

from __future__ import annotations

import pytest

from core.engine_tools import FULL, Probe, window
from fastar_pack.fastar_core.errors import GeometryError
from fastar_pack.fastar_core.geometry import plan_blocks
from fastar_pack.fastar_core.policies import PolicySettings

pytestmark = pytest.mark.cpu
KEEP = window(12, 3)
DROP = window(12, 3, recache="drop")


def span(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last + 1))


def switched(settings: PolicySettings, at: int, frames: int | None = None) -> Probe:
    """A run of blocks of 3 up to latent frame ``at``, then a recache of the last min(12, at) frames as version 1."""
    probe = Probe(settings, 40, 3)
    probe.advance(plan_blocks(at, 3))
    count = min(12, at) if frames is None else frames
    probe.call("recache", at - count, count, version=1)
    return probe


def new(probe: Probe, *frames: int) -> tuple[int, ...]:
    return tuple(probe.total + f for f in frames)


def follow(probe: Probe, start: int) -> tuple[int, ...]:
    """Frames the block at ``start`` sees; those rewritten by the recache are version 1."""
    seen = probe.block(start, 3)
    frames = sorted(f - probe.total if f >= probe.total else f for f in seen)
    assert tuple(frames) == probe.policy.visible_frames(start, 3)
    return seen


def test_keep_leaves_a_distant_sink_as_it_was() -> None:
    probe = switched(KEEP, 18)
    assert follow(probe, 18) == (*span(0, 2), *span(18, 20), *new(probe, *span(12, 17)))
    assert follow(probe, 21) == (*span(0, 2), *span(18, 23), *new(probe, *span(15, 17)))


@pytest.mark.parametrize("settings", [KEEP, DROP])
@pytest.mark.parametrize("at", [3, 6, 9, 12])
def test_a_recache_from_frame_0_rewrites_the_sink(settings: PolicySettings, at: int) -> None:
    probe = switched(settings, at)
    recent = span(max(3, at - 6), at - 1) if at == 12 else span(3, at - 1)
    assert follow(probe, at) == (*span(at, at + 2), *new(probe, *span(0, 2), *recent))


def test_drop_makes_the_first_recached_frames_the_new_sink() -> None:
    probe = switched(DROP, 18)
    assert follow(probe, 18) == (*span(18, 20), *new(probe, *span(6, 8), *span(12, 17)))
    assert follow(probe, 21) == (*span(18, 23), *new(probe, *span(6, 8), *span(15, 17)))
    assert follow(probe, 24) == (*span(18, 26), *new(probe, *span(6, 8)))


def test_drop_of_fewer_frames_than_the_window_refills_it() -> None:
    probe = switched(DROP, 18, frames=6)
    assert follow(probe, 18) == (*span(18, 20), *new(probe, *span(12, 17)))
    assert follow(probe, 21) == (*span(18, 23), *new(probe, *span(12, 17)))
    assert follow(probe, 24) == (*span(18, 26), *new(probe, *span(12, 14)))


def test_the_recached_frames_see_each_other_in_both_directions() -> None:
    probe = Probe(KEEP, 40, 3)
    probe.advance(plan_blocks(18, 3))
    assert probe.call("recache", 6, 12, version=1) == (*span(0, 2), *new(probe, *span(9, 17)))
    probe = Probe(DROP, 40, 3)
    probe.advance(plan_blocks(18, 3))
    assert probe.call("recache", 6, 12, version=1) == new(probe, *span(6, 17))


def test_full_rewrites_only_the_recached_frames() -> None:
    probe = switched(FULL, 18)
    assert follow(probe, 18) == (*span(0, 5), *span(18, 20), *new(probe, *span(6, 17)))


def test_a_recache_cannot_be_rolled_back() -> None:
    probe = switched(KEEP, 18)
    with pytest.raises(GeometryError, match="can undo nothing"):
        probe.policy.rollback(15)


def test_drop_of_more_frames_than_the_window_holds_is_refused() -> None:
    probe = Probe(DROP, 40, 3)
    probe.advance(plan_blocks(18, 3))
    with pytest.raises(GeometryError, match="15 latent frames does not fit in a window of 12"):
        probe.call("recache", 3, 15)


@pytest.mark.parametrize("settings", [KEEP, DROP, FULL])
def test_a_prefill_of_frame_0_starts_a_new_timeline(settings: PolicySettings) -> None:
    probe = switched(settings, 18)
    assert probe.call("prefill", 0, 3, version=1) == new(probe, *span(0, 2))
    assert probe.block(3, 3) == (*span(3, 5), *new(probe, *span(0, 2)))
    assert probe.policy.visible_frames(3, 3) == span(0, 5)
