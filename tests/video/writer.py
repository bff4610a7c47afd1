"""Child process: writes numbered blocks of 12 frames with VideoSink and reports each one, until it is killed or fails.

Arguments: host checkout, base folder, "tear" (stop in the middle of the fourth fragment) or the largest file size in bytes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests_support import start_host
from video.frames import numbered


class Torn:
    """A file that stops for ever half-way through one write."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        self._file.write(data[:len(data) // 2])
        print("torn", flush=True)
        time.sleep(600)
        return 0


def main() -> None:
    """Print "<frames> <path>" after every block, at the end the error."""
    host, base, limit = sys.argv[1:4]
    start_host(Path(host), Path(base))
    from fastar_pack.fastar_core.errors import FastARError
    from fastar_pack.nodes.host.video_file import VideoSink

    sink = VideoSink("video/clip", 64, 48, 16, prompt={"1": {}})
    if limit != "tear":
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    try:
        for block in range(40):
            if limit == "tear" and block == 3:
                sink._file = Torn(sink._file)
            sink.write(numbered(12 * block, 12))
            print(sink.frames_written, sink.path, flush=True)
        sink.close()
    except FastARError as reason:
        print("error", reason, flush=True)


if __name__ == "__main__":
    main()
