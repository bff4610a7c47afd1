"""The fixtures and the marker rule that the other tests rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests_support import ALIAS, PACK_ROOT, load_pack, marker_faults

pytestmark = pytest.mark.cpu


def test_the_pack_is_loaded_once(pack: ModuleType) -> None:
    import fastar_pack

    assert pack is fastar_pack
    assert load_pack() is sys.modules[ALIAS] is pack


def test_a_folder_that_fails_to_load_leaves_no_module(tmp_path: Path) -> None:
    (tmp_path / "__init__.py").write_text("raise OSError('broken')", encoding="utf-8")
    with pytest.raises(OSError, match="broken"):
        load_pack("broken_pack", tmp_path)
    assert "broken_pack" not in sys.modules


@pytest.mark.parametrize("marks", [set(), {"parametrize"}, {"cpu", "gpu"}, {"cpu", "gpu", "manual"}])
def test_none_or_several_markers_are_a_fault(marks: set[str]) -> None:
    assert len(marker_faults({"a": marks, "b": {"cpu", "parametrize"}})) == 1


@pytest.mark.parametrize(
    ("mark", "code", "said"), [("", 4, "exactly one is needed"), ("@pytest.mark.cpu", 0, "1 passed")]
)
def test_collection_fails_for_an_unmarked_test(tmp_path: Path, mark: str, code: int, said: str) -> None:
    test = tmp_path / "test_sample.py"
    test.write_text(f"import pytest\n\n{mark}\ndef test_a():\n    pass\n", encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", str(PACK_ROOT / "pyproject.toml"), "-p", "conftest", str(test)],
        env=os.environ | {"PYTHONPATH": str(PACK_ROOT / "tests")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == code, result.stdout + result.stderr
    assert said in result.stdout + result.stderr


def test_poisoned_memory_is_seen(poisoned_memory: None) -> None:
    plain = torch.zeros(2, 3)
    for tensor in (torch.empty(2, 3), torch.empty_like(plain), plain.new_empty((4,)), torch.empty_strided((2,), (1,))):
        assert tensor.isnan().all()
    assert torch.empty(2, dtype=torch.bfloat16).isnan().all()
    assert (torch.empty(3, dtype=torch.int64) == torch.iinfo(torch.int64).max).all()
    assert torch.empty(3, dtype=torch.bool).all()


def test_memory_is_not_poisoned_without_the_fixture() -> None:
    assert torch.empty.__module__ != "conftest"
    assert torch.empty is torch._C._VariableFunctions.empty


def test_every_test_starts_from_the_same_seed() -> None:
    assert torch.initial_seed() == 0
    assert torch.get_num_threads() == 1
