"""Where decoded frames go: all into memory, or block by block into files. Either way the surplus is cut off."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import folder_paths
import torch
from comfy_api.latest._input_impl import VideoFromComponents
from comfy_api.latest._util import VideoComponents

from ...fastar_core.errors import FastARError
from ...fastar_core.stream_choice import Canvas
from .video_file import VideoSink, frame_rate


class FramesOut(Protocol):
    """Takes frames [B, F, height, width, 3] in 0..1 in order; ``count`` frames per row were kept so far."""

    count: int

    def add(self, frames: torch.Tensor) -> None: ...

    def close(self) -> None:
        """Called in every case, also after an error; may be called twice."""
        ...

    def images(self) -> torch.Tensor:
        """IMAGE [frames, height, width, 3]: everything in memory, else the last block."""
        ...

    def videos(self) -> list[Any]:
        """One host VIDEO per row of the batch."""
        ...

    def files(self) -> list[tuple[Path, int]]:
        """(path, frames in it) of the files with something in them."""
        ...


class MemoryFrames:
    """All frames in one tensor, allocated once. Raises ConfigError for an fps that no video can have."""

    def __init__(self, canvas: Canvas, fps: float) -> None:
        self.canvas, self.rate = canvas, frame_rate(fps)
        self.count = 0
        self._store: torch.Tensor | None = None

    def add(self, frames: torch.Tensor) -> None:
        kept = frames[:, :self.canvas.length - self.count, ..., :3]
        if self._store is None:
            self._store = torch.empty((kept.shape[0], self.canvas.length, *kept.shape[2:]), dtype=torch.float32)
        self._store[:, self.count:self.count + kept.shape[1]] = kept
        self.count += kept.shape[1]

    def close(self) -> None:
        pass

    def images(self) -> torch.Tensor:
        if self._store is None or self.count < self.canvas.length:
            raise FastARError(f"the VAE decoded {self.count} frames, expected {self.canvas.length}; use the Wan 2.1 "
                              "VAE")
        return self._store.flatten(0, 1)

    def videos(self) -> list[Any]:
        rows = self.images().unflatten(0, (-1, self.canvas.length))
        return [VideoFromComponents(VideoComponents(images=row, frame_rate=self.rate)) for row in rows]

    def files(self) -> list[tuple[Path, int]]:
        return []


class FileFrames:
    """One fragmented mp4 per row of the batch; in memory only the last chunk."""

    def __init__(self, canvas: Canvas, fps: float, prefix: str, prompt: Any = None, extra_pnginfo: Any = None) -> None:
        self.canvas = canvas
        self.count = 0
        names = [prefix] if canvas.batch == 1 else [f"{prefix}_row{row + 1}" for row in range(canvas.batch)]
        self._sinks = [VideoSink(name, canvas.width, canvas.height, fps, prompt, extra_pnginfo) for name in names]
        self._last: torch.Tensor | None = None

    def add(self, frames: torch.Tensor) -> None:
        kept = frames[:, :self.canvas.length - self.count]
        if kept.shape[1] == 0:
            return
        for row, sink in zip(kept, self._sinks):
            sink.write(row)
        self.count += kept.shape[1]
        self._last = kept.detach().clone()

    def close(self) -> None:
        """Closes every file, also when closing one of them fails; raises the first failure."""
        failure: Exception | None = None
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as reason:  # the other files have to be closed too
                failure = failure or reason
        if failure is not None:
            raise failure

    def images(self) -> torch.Tensor:
        if self._last is None:
            raise FastARError("the VAE decoded no frame; use the Wan 2.1 VAE")
        return self._last.float().flatten(0, 1)

    def videos(self) -> list[Any]:
        return [sink.as_video() for sink in self._sinks]

    def files(self) -> list[tuple[Path, int]]:
        return [(sink.path, sink.frames_written) for sink in self._sinks if sink.path is not None and sink.frames_written]


def preview_entries(files: list[tuple[Path, int]]) -> dict[str, Any]:
    """The ui entries with which the host's Save Video shows a file."""
    output = Path(folder_paths.get_output_directory())
    entries = []
    for path, _ in files:
        inside = path.relative_to(output) if path.is_relative_to(output) else Path(path.name)
        subfolder = inside.parent.as_posix().removeprefix(".")
        entries.append({"filename": path.name, "subfolder": subfolder, "type": "output"})
    return {"images": entries, "animated": (True,)} if entries else {}
