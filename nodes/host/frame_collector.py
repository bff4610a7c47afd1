"""Takes the decoded frames of a run: keeps all of them in memory, or writes them to files and keeps the last block."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from comfy_api.latest._input_impl import VideoFromComponents
from comfy_api.latest._util import VideoComponents
from torch import Tensor

from ...fastar_core.errors import ConfigError, FastARError, GeometryError
from .video_file import VideoSink, frame_rate

logger = logging.getLogger(__name__)

FRAMES_TO = ("memory", "file")
FILE_ABOVE_FRAMES = 129  # "auto" of frames_to


def frames_to_mode(asked: str, length: int) -> str:
    """ "memory" or "file"; "auto" means files for videos longer than FILE_ABOVE_FRAMES pixel frames."""
    if asked == "auto":
        return "file" if length > FILE_ABOVE_FRAMES else "memory"
    if asked not in FRAMES_TO:
        raise ConfigError(f"frames_to is '{asked}', expected auto, {' or '.join(FRAMES_TO)}; change frames_to")
    return asked


class BatchSink:
    """One video file per batch row, numbered one after the other. Arguments as for VideoSink."""

    def __init__(self, batch: int, path_prefix: str, width: int, height: int, fps: float, prompt: Any = None,
                 extra_pnginfo: Mapping[str, Any] | None = None) -> None:
        self.sinks = [VideoSink(path_prefix, width, height, fps, prompt, extra_pnginfo) for _ in range(batch)]

    @property
    def frames_written(self) -> int:
        """Frames that every file holds."""
        return min(sink.frames_written for sink in self.sinks)

    @property
    def paths(self) -> list[Path]:
        """The files made so far, by batch row."""
        return [sink.path for sink in self.sinks if sink.path is not None]

    @property
    def notes(self) -> str:
        """What the user should know about the files; empty when there is nothing."""
        return self.sinks[0].note

    def write(self, frames: Tensor) -> None:
        """frames [B, F, H, W, 3]: one fragment per file. Raises FastARError as VideoSink.write, all files closed."""
        try:
            for sink, row in zip(self.sinks, frames, strict=True):
                sink.write(row)
        except BaseException:
            self._close_rest()
            raise

    def close(self) -> list[Path]:
        """Finish every file; their paths. Raises the first error after all of them are closed."""
        try:
            return [path for sink in self.sinks if (path := sink.close()) is not None]
        except BaseException:
            self._close_rest()
            raise

    def _close_rest(self) -> None:
        for sink in self.sinks:
            _close_quietly(sink)


def _close_quietly(sink: VideoSink) -> None:
    """Close while another error is already on its way up."""
    try:
        sink.close()
    except FastARError as reason:
        logger.warning("FAST-AR: %s", reason)


class FrameCollector:
    """The IMAGE and VIDEO outputs of a run of `length` pixel frames (frames beyond it are cut off).

    mode "memory": all frames in one tensor, made once, never copied. mode "file": frames go to `sink` and are
    forgotten, but for the last block; memory does not grow with length.
    """

    def __init__(self, mode: str, length: int, fps: float, sink: BatchSink | None = None) -> None:
        if mode not in FRAMES_TO or (mode == "file") != (sink is not None):
            raise ConfigError(f"frames_to is '{mode}' with {'a' if sink else 'no'} file; expected 'memory' without "
                              "or 'file' with one")
        if length < 1:
            raise GeometryError(f"length is {length} pixel frames, at least 1 is needed")
        self.mode, self.length, self.fps = mode, length, fps
        self.sink = sink
        self.frames = 0
        self._kept: Tensor | None = None

    def add(self, frames: Tensor) -> int:
        """frames [B, F, H, W, 3] in 0..1 on the CPU, F may be 0; returns how many were kept."""
        frames = frames[:, :self.length - self.frames]
        count = frames.shape[1]
        if not count:
            return 0
        if self.sink is not None:
            self.sink.write(frames)
            self._kept = frames
        else:
            if self._kept is None:
                self._kept = torch.empty(frames.shape[0], self.length, *frames.shape[2:])
            self._kept[:, self.frames:self.frames + count] = frames
        self.frames += count
        return count

    def images(self) -> Tensor:
        """The IMAGE output [B * F, H, W, 3], batch rows one after the other; in file mode the last block only."""
        if self._kept is None:
            raise FastARError("no frame was decoded, so there is no picture to hand on")
        kept = self._kept if self.mode == "file" else self._kept[:, :self.frames]
        return kept.flatten(0, 1)

    def close(self) -> list[Path]:
        """Finish the files; call it however the run ended. Returns their paths (none in memory mode)."""
        return self.sink.close() if self.sink is not None else []

    def video(self) -> Any:
        """The VIDEO output. Memory: the frames of images(). File: the file of the first batch row (the log names
        all).
        """
        if self.sink is None:
            return VideoFromComponents(VideoComponents(images=self.images(), frame_rate=frame_rate(self.fps)))
        if len(self.sink.sinks) > 1:
            logger.info("FAST-AR: one video per batch row was written: %s; the VIDEO output is the first",
                        ", ".join(str(path) for path in self.sink.paths))
        return self.sink.sinks[0].as_video()
