"""What the user reads: lines, and a progress bar that turns into plain lines where there is no terminal."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO


class Talk:
    """Writes to stdout, or to stderr when stdout is kept for JSON. `quiet_s` = seconds between lines off a terminal."""

    def __init__(self, json_mode: bool = False, stream: TextIO | None = None, quiet_s: float = 5.0) -> None:
        self.stream = stream or (sys.stderr if json_mode else sys.stdout)
        self.live = self.stream.isatty()
        self._quiet_s = quiet_s
        self._last = float("-inf") if self.live else time.monotonic()
        self._width = 0

    def say(self, text: str) -> None:
        """One line, below a finished bar if one is shown."""
        self.clear()
        self._put(text + "\n")

    def bar(self, text: str, now: float | None = None, force: bool = False) -> None:
        """Show the current state: redrawn in place on a terminal, else a line every `quiet_s` s or when forced."""
        now = time.monotonic() if now is None else now
        if not force and now - self._last < (0.1 if self.live else self._quiet_s):
            return
        self._last = now
        if not self.live:
            self._put(text + "\n")
            return
        text = text[: max(shutil.get_terminal_size().columns - 1, 20)]
        self._put("\r" + text.ljust(self._width))
        self._width = len(text)

    def clear(self) -> None:
        """Take the bar away."""
        if self.live and self._width:
            self._put("\r" + " " * self._width + "\r")
        self._width = 0

    def _put(self, text: str) -> None:
        encoding = self.stream.encoding or "utf-8"
        self.stream.write(text.encode(encoding, "replace").decode(encoding))
        self.stream.flush()


def bar_text(done: float, width: int = 24) -> str:
    """`[#####-----]` for a share of 0..1."""
    filled = round(min(max(done, 0.0), 1.0) * width)
    return "[" + "#" * filled + "-" * (width - filled) + "]"


def clock(seconds: float) -> str:
    """`42 s`, `3:05 min` or `1:02:03 h`."""
    whole = max(round(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d} h"
