"""Frames whose number can be read back from their pixels, also after lossy coding."""

from __future__ import annotations

from pathlib import Path

import av
import torch

LEVELS = 8  # shades per square, far apart


def numbered(first: int, count: int, width: int = 64, height: int = 48) -> torch.Tensor:
    """[count, height, width, 3] in 0..1: three squares of flat grey hold the digits of the frame number in base 8."""
    frames = torch.zeros(count, height, width, 3)
    for place in range(count):
        for digit in range(3):
            shade = (first + place) // LEVELS**digit % LEVELS
            frames[place, :, width * digit // 3:width * (digit + 1) // 3] = shade / (LEVELS - 1)
    return frames


def numbers(path: Path | str) -> list[int]:
    """The frame numbers of a video file in the order a player shows them."""
    found = []
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            pixels = frame.to_ndarray(format="rgb24")
            row, width = pixels[pixels.shape[0] // 2, :, 0].astype(float), pixels.shape[1]
            shades = [row[width * (2 * digit + 1) // 6] / 255 * (LEVELS - 1) for digit in range(3)]
            found.append(sum(round(shade) * LEVELS**digit for digit, shade in enumerate(shades)))
    return found


def times(path: Path | str) -> list[float]:
    """Seconds at which the frames of a file are shown."""
    with av.open(str(path)) as container:
        return [float(frame.time) for frame in container.decode(video=0)]
