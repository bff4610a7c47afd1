"""Arithmetic of frames, tokens and blocks."""

from __future__ import annotations

import pytest

from fastar_pack.fastar_core import geometry
from fastar_pack.fastar_core.errors import GeometryError
from fastar_pack.fastar_core.geometry import (
    kv_bytes_per_frame,
    latent_frames_for,
    pixel_frames_for,
    plan_blocks,
    prefix_chunks,
    token_grid,
)

pytestmark = pytest.mark.cpu


def coverage_faults(blocks: list[geometry.Block], total: int, size: int, prefix: int) -> list[str]:
    frames = [f for b in blocks for f in range(b.start, b.start + b.num_frames)]
    faults = [] if frames == list(range(prefix, total)) else ["not every frame once and in order"]
    faults += ["a block that is not full before the last"] if any(b.num_frames != size for b in blocks[:-1]) else []
    faults += ["an empty or too long last block"] if not 0 < blocks[-1].num_frames <= size else []
    faults += ["indices"] if [b.index for b in blocks] != list(range(len(blocks))) else []
    return faults


def test_blocks_cover_every_frame_once() -> None:
    for total in range(1, 201):
        for size in (1, 2, 3, 4, 7, 200):
            for prefix in {0, 1, 3, 7, total - 1}:
                if prefix < total:
                    assert coverage_faults(plan_blocks(total, size, prefix), total, size, prefix) == []


def test_wrong_plans_are_noticed() -> None:
    right = plan_blocks(10, 3, 1)
    assert right[-1] == geometry.Block(2, 7, 3)
    for wrong in (right[:-1], right[1:], right + right[-1:], plan_blocks(10, 3, 0), plan_blocks(9, 3, 1), plan_blocks(10, 2, 1)):
        assert coverage_faults(wrong, 10, 3, 1)


def test_prefix_chunks_cover_the_prefix_once() -> None:
    for prefix in range(40):
        for size in (1, 2, 3, 4):
            chunks = prefix_chunks(prefix, size)
            assert [f for start, count in chunks for f in range(start, start + count)] == list(range(prefix))
            assert all(count == size for _, count in chunks[:-1])


@pytest.mark.parametrize(
    ("total", "size", "prefix", "words"),
    [
        (9, 0, 0, "block size is 0"),
        (0, 3, 0, "leave nothing to generate"),
        (5, 3, 5, "5 prefix latent frames leave nothing to generate in a video of 5"),
        (5, 3, -1, "-1 prefix"),
    ],
)
def test_impossible_plans_are_refused(total: int, size: int, prefix: int, words: str) -> None:
    with pytest.raises(GeometryError, match=words):
        plan_blocks(total, size, prefix)


def test_pixel_and_latent_frames() -> None:
    for pixels in range(1, 400):
        latents = latent_frames_for(pixels)
        assert pixel_frames_for(latents) >= pixels
        assert latents == 1 or pixel_frames_for(latents - 1) < pixels
    assert [latent_frames_for(n) for n in (1, 2, 5, 6, 81, 82)] == [1, 2, 2, 3, 21, 22]
    for wrong in (0, -3):
        with pytest.raises(GeometryError, match="at least 1"):
            latent_frames_for(wrong)
        with pytest.raises(GeometryError, match="at least 1"):
            pixel_frames_for(wrong)


def test_token_grid_rounds_up() -> None:
    assert token_grid(60, 104) == (30, 52)
    assert token_grid(9, 13) == (5, 7)
    assert token_grid(1, 1) == (1, 1)
    with pytest.raises(GeometryError, match="0 x 8 is empty"):
        token_grid(0, 8)


def test_cache_bytes_of_published_sizes() -> None:
    assert kv_bytes_per_frame(30, 1536, 1560, 2) == 287_539_200
    assert kv_bytes_per_frame(40, 5120, 1560, 2) == 1_277_952_000
    assert kv_bytes_per_frame(30, 1536, 1560, 2, batch=2) == 2 * 287_539_200
