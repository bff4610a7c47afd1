"""A video file that grows block by block in the host's output folder and plays up to the last block whatever happens.

While it grows it is a fragmented mp4; close() adds the frame table that makes it an ordinary one (mp4_index.py).
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import folder_paths
import torch
from comfy.cli_args import args
from comfy_api.latest._input_impl import VideoFromFile
from torch import Tensor

from ...fastar_core.errors import ConfigError, FastARError, GeometryError
from .fragments import FragmentEncoder
from .mp4_index import complete_header, data_cover, skipped

logger = logging.getLogger(__name__)

_ADVICE = {
    errno.ENOSPC: "the disk is full: free space on it, or start ComfyUI with --output-directory on another disk",
    errno.EDQUOT: "your disk quota is used up: free space, or start ComfyUI with --output-directory on another disk",
    errno.EFBIG: "the file reached the largest size this file system or account allows: use a shorter length, or start "
                 "ComfyUI with --output-directory on another disk",
    errno.EACCES: "ComfyUI may not write there: change the permissions, or start it with --output-directory elsewhere",
    errno.EROFS: "that disk is read-only: start ComfyUI with --output-directory elsewhere",
}


def file_metadata(prompt: Any, extra_pnginfo: Mapping[str, Any] | None) -> dict[str, str]:
    """Tags of the file: the same keys and texts as the host's Save Video writes; none with --disable-metadata."""
    if args.disable_metadata:
        return {}
    tags = dict(extra_pnginfo or {})
    if prompt is not None:
        tags["prompt"] = prompt
    return {key: json.dumps(value) for key, value in tags.items()}


def frame_rate(fps: float) -> Fraction:
    """Frames per second as the fraction that the host's own writer uses. Raises ConfigError unless 0.001 <= fps <=
    1000.
    """
    if not 0.001 <= fps <= 1000:
        raise ConfigError(f"fps is {fps}, it must lie between 0.001 and 1000; change fps")
    return Fraction(round(fps * 1000), 1000)


class VideoSink:
    """One mp4 (h264, 4:2:0) written fragment by fragment. The file is made at the first write, under the host's next
    free number; an existing file is never touched.

    path_prefix: as in Save Video, relative to the output folder. width, height: pixels; an odd size is widened by one
    repeated column or row (the codec stores even sizes only) and `note` says so. Raises FastARError when the folder
    cannot be used.
    """

    def __init__(self, path_prefix: str, width: int, height: int, fps: float, prompt: Any = None,
                 extra_pnginfo: Mapping[str, Any] | None = None) -> None:
        if width < 1 or height < 1:
            raise GeometryError(f"a video of {width} x {height} pixels cannot be written; choose a larger width and "
                                "height")
        self.width, self.height, self.fps = width, height, fps
        self.path: Path | None = None
        self.frames_written = 0
        self.note = ""
        self._file: Any = None
        self._closed = False
        self._end = 0  # file size up to the last complete fragment
        self._encoder = FragmentEncoder(width + width % 2, height + height % 2, frame_rate(fps),
                                        file_metadata(prompt, extra_pnginfo))
        if width % 2 or height % 2:
            self.note = (f"the video file is {width + width % 2} x {height + height % 2} instead of {width} x "
                         f"{height} pixels (mp4 needs even sizes): the last column or row is repeated")
            logger.warning("FAST-AR: %s", self.note)
        self._folder, self._name, self._counter = self._place(path_prefix)

    def _place(self, prefix: str) -> tuple[Path, str, int]:
        output = folder_paths.get_output_directory()
        try:
            folder, name, counter, _, _ = folder_paths.get_save_image_path(prefix, output, self.width, self.height)
        except OSError as reason:
            raise self._failure(reason, Path(output) / prefix) from reason
        except Exception as reason:  # the host's plain Exception for a path that leaves the output folder
            raise ConfigError(f"filename_prefix is '{prefix}', which lies outside the output folder {output} or is no file name; "
                              "give a name inside it, such as video/FAST-AR") from reason
        if not os.access(folder, os.W_OK):
            raise self._failure(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), Path(folder))
        return Path(folder), name, counter

    def write(self, frames: Tensor) -> None:
        """frames [F, height, width, 3 or more] in 0..1: one fragment, on the disk when this returns.

        A write error closes the file behind the last complete fragment and raises FastARError with the path, the frames
        that are safe, and what to change.
        """
        if self._closed:
            raise FastARError(f"the video file {self.path} is closed already; {len(frames)} frames came too late")
        if frames.ndim != 4 or tuple(frames.shape[1:3]) != (self.height, self.width) or frames.shape[3] < 3:
            raise GeometryError(f"frames of shape {tuple(frames.shape)} do not fit a video of {self.width} x "
                                f"{self.height} pixels; expected [F, {self.height}, {self.width}, 3]")
        if len(frames):
            self._append(self._encoder.encode(self._even(frames[..., :3].detach().cpu())))

    def _even(self, frames: Tensor) -> Tensor:
        if self.width % 2:
            frames = torch.cat((frames, frames[:, :, -1:]), 2)
        if self.height % 2:
            frames = torch.cat((frames, frames[:, -1:]), 1)
        return frames

    def _append(self, fragment: bytes) -> None:
        """Write a fragment so that it counts only when it is complete: until then players see a box to skip."""
        try:
            start = self._end
            if self._file is None:
                self._create()
                self._put(self._encoder.header)
                start = len(self._encoder.header)
            self._put(skipped(fragment))
            self._file.seek(start)
            self._put(fragment[:8])
            self._file.seek(0, os.SEEK_END)
        except OSError as reason:
            self._shut(cut=True)
            raise self._failure(reason, self.path or self._folder) from reason
        self._end = start + len(fragment)
        self.frames_written = self._encoder.frames_out

    def _put(self, data: bytes) -> None:
        """All of `data` at the file position, on the disk when this returns."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest):]
        os.fsync(self._file.fileno())  # network and quota errors show up here, not in write

    def _create(self) -> None:
        while self._file is None:
            self.path = self._folder / f"{self._name}_{self._counter:05}_.mp4"
            try:
                self._file = self.path.open("xb", buffering=0)
            except FileExistsError:  # another run took the number meanwhile
                self._counter += 1

    def _shut(self, cut: bool) -> None:
        """Close the file; `cut` removes what a failed write left behind the last complete fragment."""
        self._closed = True
        self._encoder.release()
        if self._file is None:
            return
        try:
            if cut:
                self._file.truncate(self._end)
        except OSError:  # players skip a torn end, so the frames before it stay safe
            logger.warning("FAST-AR: the incomplete end of %s could not be cut off", self.path)
        finally:
            self._file.close()

    def _failure(self, reason: OSError, path: Path) -> FastARError:
        advice = _ADVICE.get(reason.errno or 0, "check that disk, or start ComfyUI with --output-directory elsewhere")
        safe = (f"{self.frames_written} frames ({self.frames_written / self.fps:.1f} s) are safe in it and play"
                if self.frames_written else "no frame was written yet")
        return FastARError(f"writing the video {path} failed: {reason.strerror or reason}; {safe}. To go on, {advice}")

    def close(self) -> Path | None:
        """Finish the file; return its path, or None when no frame was ever written. Safe to call twice.

        Raises FastARError only when frames are lost; without room for the frame table the file stays fragmented.
        """
        if not self._closed:
            rest = self._encoder.finish()
            if rest:
                self._append(rest)
            self._shut(cut=self._file is not None and not self._complete())
        return self.path if self.frames_written else None

    def _complete(self) -> bool:
        """Add the frame table; False when the disk has no room for it."""
        header = self._encoder.header
        place, cover = data_cover(header, self._end)
        try:
            self._put(complete_header(header, self._encoder.table))
        except OSError as reason:
            logger.warning("FAST-AR: there is no room for the frame table of %s (%s); all frames are in it and play, "
                           "but some editors cannot open such a file", self.path, reason.strerror)
            return False
        try:
            self._file.seek(place)
            self._put(cover)
        except OSError as reason:  # never cut now: the old header may be gone, and with both the file plays as well
            logger.warning("FAST-AR: %s could not be finished: %s", self.path, reason.strerror)
        return True

    def as_video(self) -> VideoFromFile:
        """The host's VIDEO object for the file. Raises FastARError while the file is open or empty."""
        if not self._closed or not self.frames_written:
            raise FastARError(f"the video file {self.path} has {self.frames_written} frames and is "
                              f"{'closed' if self._closed else 'still open'}; it can be used once it is closed with "
                              "frames in it")
        return VideoFromFile(str(self.path))
