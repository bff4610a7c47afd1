"""Which back-end answers, and why the others did not."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fastar_pack.kernels import registry
from fastar_pack.kernels.registry import BackendError

pytestmark = pytest.mark.cpu


def qkv(keys: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(1, 3, 2, 16), torch.randn(1, keys, 2, 16), torch.randn(1, keys, 2, 16)


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Back-ends by name that the registry finds in this test: modules, or exceptions to raise at import."""
    known: dict[str, object] = {}
    plain = importlib.import_module

    def find(name: str, package: str | None = None) -> ModuleType:
        folder = name.split(".")[1] if name.startswith(".") else name
        if folder not in known:
            return plain(name, package)
        if isinstance(known[folder], BaseException):
            raise known[folder]  # type: ignore[misc]
        return known[folder]  # type: ignore[return-value]

    monkeypatch.setattr(registry, "importlib", SimpleNamespace(import_module=find))
    monkeypatch.setattr(registry, "_probes", {})
    monkeypatch.delenv(registry.ENV_BACKEND, raising=False)
    return known


def fake(answer: str, reason: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(attend=lambda *args: answer, why_not=lambda *args: reason)


def test_the_first_that_accepts_is_used(backends: dict[str, object]) -> None:
    backends |= {"torch_fast": fake("fast"), "reference": fake("slow")}
    assert registry.call("attend", "auto", *qkv(), None) == "fast"
    assert registry.call("attend", "reference", *qkv(), None) == "slow"


def test_a_refusal_passes_the_call_on(backends: dict[str, object]) -> None:
    backends |= {"torch_fast": fake("fast", "too many heads"), "reference": fake("slow")}
    assert registry.call("attend", "auto", *qkv(), None) == "slow"
    with pytest.raises(BackendError, match="torch_fast: too many heads; choose another back-end than 'torch_fast'"):
        registry.call("attend", "torch_fast", *qkv(), None)


def test_when_nobody_can_every_reason_is_given(backends: dict[str, object]) -> None:
    backends |= {"torch_fast": fake("fast", "too many heads"), "reference": fake("slow", "no float64")}
    with pytest.raises(BackendError, match="no back-end can run attend: torch_fast: too many heads; reference: no float64$"):
        registry.call("attend", "auto", *qkv(), None)


@pytest.mark.parametrize("error", [ImportError("no module"), OSError("DLL load failed"), RuntimeError("driver too old")])
def test_a_back_end_that_cannot_be_imported_is_a_reason(backends: dict[str, object], error: Exception) -> None:
    backends |= {"torch_fast": error, "reference": fake("slow")}
    assert registry.call("attend", "auto", *qkv(), None) == "slow"
    reason = f"{type(error).__name__}: {error}"
    assert registry.status() == [{"backend": "torch_fast", "status": reason}, {"backend": "reference", "status": "available"}]
    with pytest.raises(BackendError, match=str(error)):
        registry.call("attend", "torch_fast", *qkv(), None)


def test_the_real_back_ends_are_there(backends: dict[str, object]) -> None:
    assert [row["status"] for row in registry.status()] == ["available"] * len(registry.PRIORITY)
    args = qkv()
    results = [registry.call("attend", name, *args, None) for name in ("auto", *registry.PRIORITY)]
    assert all((r - results[0]).abs().max() < 1e-6 for r in results)
    assert registry.call("attend", "auto", *qkv(0), None).abs().max() == 0, "without keys the reference answers zeros"
    with pytest.raises(BackendError, match="torch_fast: there are no keys"):
        registry.call("attend", "torch_fast", *qkv(0), None)


def test_the_environment_forces_and_the_node_wins(backends: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    backends |= {"torch_fast": fake("fast"), "reference": fake("slow")}
    monkeypatch.setenv(registry.ENV_BACKEND, "reference")
    assert registry.call("attend", "auto", *qkv(), None) == "slow"
    assert registry.call("attend", "torch_fast", *qkv(), None) == "fast"
    monkeypatch.setenv(registry.ENV_BACKEND, "auto")
    assert registry.call("attend", "auto", *qkv(), None) == "fast"


@pytest.mark.parametrize("by_environment", [False, True])
def test_an_unknown_name_lists_the_known_ones(by_environment: bool, backends: dict[str, object],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    if by_environment:
        monkeypatch.setenv(registry.ENV_BACKEND, "fancy")
    with pytest.raises(BackendError, match="'fancy' is unknown; choose auto or one of torch_fast, reference"):
        registry.call("attend", "auto" if by_environment else "fancy", *qkv(), None)


def imports_under_threads(backends: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[object]]:
    imported: list[str] = []
    answers: list[object] = []

    def slow_import(name: str, package: str | None = None) -> object:
        imported.append(name)
        time.sleep(0.02)
        return fake("fast")

    monkeypatch.setattr(registry, "importlib", SimpleNamespace(import_module=slow_import))
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        answers.append(registry.call("attend", "auto", *qkv(), None))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return imported, answers


def test_threads_import_a_back_end_once(backends: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    imported, answers = imports_under_threads(backends, monkeypatch)
    assert imported == [f".torch_fast.{op}" for op in registry.OPS]
    assert answers == ["fast"] * 8


def test_without_the_lock_they_would_not(backends: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_lock", contextlib.nullcontext())
    imported, _ = imports_under_threads(backends, monkeypatch)
    assert len(imported) > len(registry.OPS)
