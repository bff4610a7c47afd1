"""Fixtures for all tests. Importing this file registers the pack as `fastar_pack` for imports at the top of tests."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests_support import HOST_VARIABLE, Host, load_pack, marker_faults, start_host

load_pack()
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Refuse unmarked tests; run gpu tests only with a GPU and manual ones only when asked for by `-m manual`."""
    faults = marker_faults({item.nodeid: {mark.name for mark in item.iter_markers()} for item in items})
    if faults:
        raise pytest.UsageError("\n".join(faults))
    skip_gpu = pytest.mark.skip(reason="needs a CUDA GPU")
    skip_manual = pytest.mark.skip(reason="manual: runs only with -m manual")
    asked = "manual" in (config.option.markexpr or "")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(skip_gpu)
        if item.get_closest_marker("manual") and not asked:
            item.add_marker(skip_manual)


@pytest.fixture(scope="session")
def pack() -> ModuleType:
    """The pack root as a package, the same module as `import fastar_pack`."""
    return load_pack()


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """A real ComfyUI imported in process, from the checkout that FASTAR_TEST_HOST names; skips without one."""
    named = os.environ.get(HOST_VARIABLE)
    if not named:
        pytest.skip(f"{HOST_VARIABLE} is not set to a ComfyUI checkout")
    path = Path(named).expanduser().resolve()
    if not (path / "comfy" / "sd.py").is_file():
        pytest.fail(f"{HOST_VARIABLE}={named} is no ComfyUI checkout: it has no comfy/sd.py")
    return start_host(path, tmp_path_factory.mktemp("host"))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with what shows up at once when it is read: NaN, the largest integer, or True."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of torch.empty, empty_like, empty_strided and Tensor.new_empty holds NaN (the maximum for integers)."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, _plain=plain, **kwargs: _poison(_plain(*args, **kwargs)))
