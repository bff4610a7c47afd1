"""The table of test lanes: each is one pytest process with its own environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .setup import Setup, browser_environment, main_environment, newer_environment

Environment = dict[str, str]


@dataclass(frozen=True)
class Lane:
    """`prepare` gives environment variables or raises LaneSkippedError. `slow` paths are left out by --fast."""

    name: str
    what: str
    prepare: Callable[[Setup], Environment]
    paths: tuple[str, ...]
    left_out: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()
    host_tests_only: bool = False  # only tests that use a fixture with "host" in its name
    in_fast: bool = False


# To add a lane, add a row. (A lane for compiled kernels on an interpreter would set its own variables in `prepare`.)
LANES = (
    Lane(
        "main",
        "everything, on ComfyUI 0.3.75 in process and as a server",
        main_environment,
        ("tests",),
        left_out=("tests/browser",),
        slow=("tests/runner/test_host_server.py",),
        in_fast=True,
    ),
    Lane(
        "newer-host",
        "the tests that use a host, on ComfyUI 0.27",
        newer_environment,
        ("tests",),
        left_out=("tests/browser", "tests/quality/test_tools.py"),
        host_tests_only=True,
    ),
    Lane("browser", "the pack in the web interface, in Chromium", browser_environment, ("tests/browser",)),
)
