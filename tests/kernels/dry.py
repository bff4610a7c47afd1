"""Launches Triton kernels up to the compiler: which specialisations do calls ask for, on a GPU that is not there?"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from fastar_pack.kernels.triton import attention, launch, nearest


class Driver:
    """A Hopper GPU as far as a launch asks before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimpleNamespace]]:
    """Every launch in the block, with the kernel's name, the key of its compiled form, and types and constants by name."""
    found: list[SimpleNamespace] = []

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002
        kernel = fn.jit_function
        types = dict(compile["signature"])
        constants = {kernel.arg_names[place[0]]: value for place, value in compile["constants"].items()}
        found.append(SimpleNamespace(name=fn.name.split(".")[-1], key=key, types=types, constants=constants))
        return True  # do not compile, do not launch

    with monkeypatch.context() as patch:
        for module in (attention, launch, nearest):
            patch.setattr(module, "arch", lambda device: "sm_90")
        patch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        patch.setattr(driver, "_active", Driver())
        patch.setattr(knobs.runtime, "jit_cache_hook", note)
        yield found
