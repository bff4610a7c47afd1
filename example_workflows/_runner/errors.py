"""Exit codes and the one exception that ends the runner with a readable message."""

from __future__ import annotations

import enum


class Exit(enum.IntEnum):
    """What the exit code of run.py means; --help prints the same table."""

    OK = 0
    CRASH = 1
    USAGE = 2
    SETUP = 3
    SERVER = 4
    REFUSED = 5
    FAILED = 6
    INTERRUPTED = 7
    TIMEOUT = 8
    LOST = 9
    NO_OUTPUT = 10


MEANING = {
    Exit.OK: "done",
    Exit.CRASH: "a fault in the runner itself",
    Exit.USAGE: "wrong option, workflow or value",
    Exit.SETUP: "ComfyUI or its Python could not be set up",
    Exit.SERVER: "the server did not start or cannot be reached",
    Exit.REFUSED: "the server refused the workflow before running it",
    Exit.FAILED: "a node failed",
    Exit.INTERRUPTED: "interrupted",
    Exit.TIMEOUT: "--timeout passed",
    Exit.LOST: "the server died or the connection broke during the run",
    Exit.NO_OUTPUT: "the run left no file, or it could not be saved",
}


class RunnerError(Exception):
    """Ends the runner. The message says what was found, what was expected and what the user can change."""

    def __init__(self, code: Exit, message: str) -> None:
        super().__init__(message)
        self.code = code
