"""All unit arithmetic in one place: pixel frames, latent frames, tokens, blocks, bytes."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import GeometryError

PIXEL_FRAMES_PER_LATENT = 4
PIXELS_PER_LATENT = 8
PATCH = 2


def latent_frames_for(pixel_frames: int) -> int:
    """Latent frames whose decode holds at least ``pixel_frames`` frames (T latents decode to 1 + 4 (T - 1))."""
    if pixel_frames < 1:
        raise GeometryError(f"length is {pixel_frames} pixel frames, at least 1 is needed")
    return 1 + -(-(pixel_frames - 1) // PIXEL_FRAMES_PER_LATENT)


def pixel_frames_for(latent_frames: int) -> int:
    """Pixel frames decoded from ``latent_frames`` latent frames."""
    if latent_frames < 1:
        raise GeometryError(f"{latent_frames} latent frames given, at least 1 is needed")
    return 1 + PIXEL_FRAMES_PER_LATENT * (latent_frames - 1)


def token_grid(latent_height: int, latent_width: int) -> tuple[int, int]:
    """Token rows and columns of one latent frame; odd latent sizes are padded up to the 1 x 2 x 2 patch."""
    if latent_height < 1 or latent_width < 1:
        raise GeometryError(f"latent size {latent_height} x {latent_width} is empty; choose a larger width and height")
    return -(-latent_height // PATCH), -(-latent_width // PATCH)


@dataclass(frozen=True)
class Block:
    """A block of ``num_frames`` latent frames starting at latent frame ``start``; ``index`` counts generated blocks."""

    index: int
    start: int
    num_frames: int


def plan_blocks(total_frames: int, block: int, prefix_frames: int = 0) -> list[Block]:
    """Blocks that cover latent frames prefix_frames .. total_frames - 1 once and in order; the last may be short."""
    if block < 1:
        raise GeometryError(f"block size is {block} latent frames, at least 1 is needed")
    if not 0 <= prefix_frames < total_frames:
        raise GeometryError(f"{prefix_frames} prefix latent frames leave nothing to generate in a video of {total_frames} "
                            "latent frames; raise length or give fewer start images")
    starts = range(prefix_frames, total_frames, block)
    return [Block(i, s, min(block, total_frames - s)) for i, s in enumerate(starts)]


def prefix_chunks(prefix_frames: int, block: int) -> list[tuple[int, int]]:
    """(start, num_frames) of the prefill calls that feed a clean prefix in chunks of the block size."""
    return [(s, min(block, prefix_frames - s)) for s in range(0, prefix_frames, block)]


@dataclass(frozen=True)
class RunGeometry:
    """Sizes a cache policy needs before the first call. Bytes count keys and values of one branch."""

    total_frames: int
    block: int
    rows: int
    cols: int
    num_layers: int
    call_frames: int = 0
    """Latent frames of the longest call (a rolling window, a recache), where that is more than a block."""

    @property
    def tokens_per_frame(self) -> int:
        return self.rows * self.cols


def kv_bytes_per_frame(num_layers: int, width: int, tokens_per_frame: int, element_bytes: int, batch: int = 1) -> int:
    """Bytes of keys + values of one latent frame over all layers (width = heads x head dim)."""
    return 2 * num_layers * width * tokens_per_frame * element_bytes * batch
