"""When Triton is used, and what happens where its compiler is not to be trusted."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastar_pack.kernels import triton as package

pytestmark = pytest.mark.cpu

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


def test_default_on_nvidia_under_linux_elsewhere_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert package.why_not_here(CUDA, False) is None
    assert "the tensors are on cpu" in str(package.why_not_here(CPU, True))
    monkeypatch.setattr(sys, "platform", "win32")
    assert "on win32 it is used only when asked for" in str(package.why_not_here(CUDA, False))
    assert package.why_not_here(CUDA, True) is None
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "on ROCm it is used only when asked for" in str(package.why_not_here(CUDA, False))
    assert package.why_not_here(CUDA, True) is None


def test_an_old_gpu_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert package.why_not_here(CUDA, True) == "it needs compute capability 8.0, the GPU has 7.5"


def test_the_interpreter_is_never_used_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert package.why_not_here(CPU, True) is None
    assert "only when asked for" in str(package.why_not_here(CPU, False))
    assert "only when asked for" in str(package.why_not_here(CUDA, True))


def probed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, version: str = "3.6.0") -> tuple[str | None, list[str]]:
    """Probes on ROCm with this probe script; returns the reason and what was imported."""
    imported: list[str] = []
    (tmp_path / "probe.py").write_text(script, encoding="utf-8")

    def load(name: str, _: str | None = None) -> SimpleNamespace:
        imported.append(name)
        return SimpleNamespace(__version__=version, run=lambda: None)

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(package, "importlib", SimpleNamespace(import_module=load))
    monkeypatch.setattr(package, "PROBE", tmp_path / "probe.py")
    return package.probe(), imported


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import os\nos.abort()", "failed in a child process (exit code -6)"),
        ("raise RuntimeError('no such target')", "RuntimeError: no such target"),
        ("import time\ntime.sleep(60)", "did not finish"),
    ],
)
def test_a_compiler_that_dies_takes_only_the_child_with_it(
    script: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(package, "PROBE_SECONDS", 2)
    reason, imported = probed(monkeypatch, tmp_path, script)
    assert words in str(reason)
    assert imported == ["triton"], "the kernel must not be compiled in this process after that"


def test_a_child_that_comes_back_well_lets_this_process_try(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert probed(monkeypatch, tmp_path, "") == (None, ["triton", ".probe"])


def test_an_old_triton_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reason, _ = probed(monkeypatch, tmp_path, "", version="2.3.1")
    assert reason == "Triton 2.3.1 is too old, 3.4 or newer is needed"


def test_the_probe_stands_alone() -> None:
    """It is started as a script in a process that does not know the pack."""
    text = package.PROBE.read_text(encoding="utf-8")
    assert "from ." not in text
    assert "import triton" in text
