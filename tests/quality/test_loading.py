"""The pack loads outside a host, with broken parts, and the guard names each broken part once."""

from __future__ import annotations

import importlib
import logging
import pkgutil
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from quality.blocked import BREAKAGES, block, forget
from tests_support import PACK_ROOT, load_pack

pytestmark = pytest.mark.cpu

ALIAS = "fastar_pack_for_one_test"
OPTIONAL = ("triton", "flashinfer")
GOOD_MODULE = "class Good:\n    NODE_ID = 'FastARGood'\n    DISPLAY_NAME = 'FAST-AR Good'\n\nNODE_CLASSES = [Good]\n"


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    forget(ALIAS)


def import_pure_parts() -> ModuleType:
    """A second copy of the pack, with every module of fastar_core and the kernel registry imported."""
    pack = load_pack(ALIAS)
    core = importlib.import_module(f"{ALIAS}.fastar_core")
    for module in pkgutil.walk_packages(core.__path__, core.__name__ + "."):
        importlib.import_module(module.name)
    return pack


@pytest.mark.parametrize("error", BREAKAGES, ids=lambda error: type(error).__name__)
def test_optional_libraries_may_be_broken(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    block(monkeypatch, error, *OPTIONAL)
    with pytest.raises(type(error)):
        importlib.import_module("triton")
    import_pure_parts()
    registry = importlib.import_module(f"{ALIAS}.kernels.registry")
    q = torch.randn(1, 2, 1, 4)
    assert registry.call("attend", "auto", q, q, q, None).shape == q.shape


@pytest.mark.parametrize("error", BREAKAGES, ids=lambda error: type(error).__name__)
def test_a_broken_back_end_costs_only_itself(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    import_pure_parts()
    registry = importlib.import_module(f"{ALIAS}.kernels.registry")
    block(monkeypatch, error, f"{ALIAS}.kernels.torch_fast")
    rows = {row["backend"]: row["status"] for row in registry.status()}
    assert type(error).__name__ in rows["torch_fast"]
    assert str(error) in rows["torch_fast"]
    assert rows["reference"] == "available"
    q = torch.randn(1, 2, 1, 4)
    assert registry.call("attend", "auto", q, q, q, None).shape == q.shape


def small_pack(folder: Path, broken: str) -> Path:
    """A pack with our node collector, one good node module and one whose source is `broken`."""
    shutil.copytree(PACK_ROOT / "nodes", folder / "nodes", ignore=lambda _, names: set(names) - {"__init__.py"})
    (folder / "__init__.py").write_text("", encoding="utf-8")
    (folder / "nodes" / "good.py").write_text(GOOD_MODULE, encoding="utf-8")
    (folder / "nodes" / "broken.py").write_text(broken, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "broken",
    [
        "raise ImportError('no such library')",
        "raise OSError('no such DLL')",
        "raise RuntimeError('no such operator')",
        "x = (",
        "y = 1",
        "class A:\n    pass\n\nNODE_CLASSES = [A]",
        GOOD_MODULE.replace("FAST-AR Good", "FAST-AR Twin"),
    ],
    ids=["ImportError", "OSError", "RuntimeError", "syntax", "no list", "no id", "id taken"],
)
@pytest.mark.parametrize("order", [("good", "broken"), ("broken", "good")])
def test_a_broken_node_module_is_named_once_and_the_others_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str, order: tuple[str, ...]
) -> None:
    load_pack(ALIAS, small_pack(tmp_path / "pack", broken))
    with caplog.at_level(logging.INFO):
        classes, names = importlib.import_module(f"{ALIAS}.nodes").collect_nodes(order)
    assert list(classes) == list(names) == ["FastARGood"]
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "'broken'" in record.getMessage() or "FastARGood" in record.getMessage()


def test_outside_a_host_there_are_no_nodes_and_no_complaints() -> None:
    code = (
        "import tests_support\n"
        "pack = tests_support.load_pack('any name-1')\n"
        "print(pack.NODE_CLASS_MAPPINGS, pack.WEB_DIRECTORY)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=PACK_ROOT / "tests", capture_output=True, text=True, check=False
    )
    assert (result.stdout.split(), result.stderr) == (["{}", "./nodes/web"], "")
