"""The table of test lanes: each is one pytest process with its own environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .kernel_lanes import NEWEST, OLDER, compiler_environment, flashinfer_environment, interpreter_environment
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


# To add a lane, add a row.
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
    Lane(
        "interpreter",
        "the Triton kernels in Triton's interpreter, against float64",
        interpreter_environment,
        ("tests/kernels/test_backends.py", "tests/kernels/test_numerics.py", "tests/kernels/test_lockstep.py",
         "tests/kernels/test_interpreter.py"),
    ),
    *(
        Lane(
            f"compiler-{version}",
            f"the Triton kernels compiled for GPUs by Triton {version}",
            compiler_environment(version),
            ("tests/kernels/test_aot.py", "tests/kernels/test_launches.py"),
        )
        for version in (NEWEST, OLDER)
    ),
    Lane(
        "flashinfer",
        "our FlashInfer variant compiled by nvcc",
        flashinfer_environment,
        ("tests/kernels/test_flashinfer.py",),
    ),
    Lane("browser", "the pack in the web interface, in Chromium", browser_environment, ("tests/browser",)),
)
