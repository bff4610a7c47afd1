"""Runs a command as a child and ends it when our stdin closes: it never outlives the runner, however that dies.

Started with the command line of a server or of pip as arguments; needs nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE_S = 8.0


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ask, wait, then insist."""
    child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()


def _watch(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 1):  # not through sys.stdin: its lock, still held, would spoil our own exit
            pass
    if child.poll() is None:
        _end(child)


def main(command: list[str]) -> int:
    """Run `command` until it ends or stdin closes; returns its exit code."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: _end(child))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner decides what Ctrl-C means
    threading.Thread(target=_watch, args=(child,), daemon=True).start()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
