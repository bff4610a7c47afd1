"""Hundreds of blocks through decoder and file: memory stays flat, order and number of frames are right."""

from __future__ import annotations

import gc
import importlib
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from fastar_pack.fastar_core.stream_choice import Canvas
from tests_support import Host
from video.frames import LEVELS, numbered, numbers

pytestmark = pytest.mark.cpu
BLOCKS, WIDTH, HEIGHT = 400, 128, 96


class NumberCodec:
    """Latent frames that carry the number of their first pixel frame; independent of each other."""

    latent_channels, latent_dim, output_channels = 16, 3, 3

    class first_stage_model:  # noqa: N801 - the name the host gives it
        frames_independent = True

    def spacial_compression_decode(self) -> int:
        return 8

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        frames = [numbered(int(first), 4, WIDTH, HEIGHT) for first in latents[0, 0, :, 0, 0]]
        return torch.cat([frames[0][3:], *frames[1:]])[None]


def resident() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 1e6


def feed(out: Any, decoder: Any, block: int) -> None:
    start = torch.arange(3 * block, 3 * block + 3) * 4.0 - 3
    out.add(decoder.push(start.reshape(1, 1, 3, 1, 1).expand(1, 16, 3, HEIGHT // 8, WIDTH // 8)))


def test_400_blocks_to_a_file(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    frames_out = importlib.import_module("fastar_pack.nodes.host.frames_out")
    decode = importlib.import_module("fastar_pack.nodes.host.decode")
    length = 12 * BLOCKS - 3 - 5  # the last block is cut
    out = frames_out.FileFrames(Canvas(WIDTH, HEIGHT, length, 1), 16.0, "long")
    decoder = decode.StreamDecoder(NumberCodec())
    for block in range(40):
        feed(out, decoder, block)
    early = resident()
    for block in range(40, BLOCKS):
        feed(out, decoder, block)
    grown = resident() - early
    all_frames = (BLOCKS - 40) * 12 * WIDTH * HEIGHT * 3 * 4 / 1e6
    assert all_frames > 600
    assert grown < 40, f"{grown:.0f} MB more after {BLOCKS} blocks, all frames would be {all_frames:.0f} MB"
    out.close()
    (path, count), = out.files()
    assert count == length
    assert numbers(path) == [number % LEVELS**3 for number in range(length)]
    assert out.images().shape == (7, HEIGHT, WIDTH, 3)
