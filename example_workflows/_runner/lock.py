"""One set-up at a time: an operating-system lock, so that it ends with the process that holds it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

if sys.platform == "win32":
    import msvcrt

    def _take(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

    def _give(descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
else:
    import fcntl

    def _take(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _give(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def locked(path: Path, on_wait: Callable[[], None], poll_s: float = 0.5) -> Iterator[None]:
    """Hold the lock file `path`; `on_wait` is called once when another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    waited = False
    try:
        while True:
            try:
                _take(descriptor)
                break
            except OSError:
                if not waited:
                    on_wait()
                waited = True
                time.sleep(poll_s)
        try:
            yield
        finally:
            _give(descriptor)
    finally:
        os.close(descriptor)
