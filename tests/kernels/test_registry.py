"""Which back-end answers, and why the others did not."""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastar_pack.kernels import registry
from fastar_pack.kernels.ops import ArgumentError
from fastar_pack.kernels.registry import BackendError, OpFailedError

pytestmark = pytest.mark.cpu
NAMES = ("torch_fast", "reference")


def qkv(keys: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(1, 3, 2, 16), torch.randn(1, keys, 2, 16), torch.randn(1, keys, 2, 16)


def ask(backend: str = "auto") -> Any:
    return registry.call("attend", backend, *qkv())


def fake(answer: str, reason: str | None = None, **package: Any) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A back-end's package and its attend module."""
    return SimpleNamespace(**package), SimpleNamespace(attend=lambda *args: answer, why_not=lambda *args: reason)


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Back-ends by name that a fresh registry finds in this test: (package, op module), or an exception to raise at import."""
    known: dict[str, Any] = {}

    def find(name: str, package: str | None = None) -> Any:
        folder, _, op = name.removeprefix(".").partition(".")
        if folder not in known:
            return importlib.import_module(name, package)
        if isinstance(known[folder], BaseException):
            raise known[folder]
        return known[folder][1 if op else 0]

    monkeypatch.setattr(registry, "importlib", SimpleNamespace(import_module=find))
    monkeypatch.setattr(registry, "_backends", {})
    monkeypatch.setattr(registry, "PRIORITY", NAMES)
    monkeypatch.delenv(registry.ENV_BACKEND, raising=False)
    return known


def test_the_first_that_accepts_is_used(backends: dict[str, Any]) -> None:
    backends |= {"torch_fast": fake("fast"), "reference": fake("slow")}
    assert ask() == "fast"
    assert ask("reference") == "slow"


def test_a_refusal_passes_the_call_on(backends: dict[str, Any]) -> None:
    backends |= {"torch_fast": fake("fast", "too many heads"), "reference": fake("slow")}
    assert ask() == "slow"
    with pytest.raises(BackendError, match="torch_fast: too many heads; choose another back-end than 'torch_fast'"):
        ask("torch_fast")


def test_when_nobody_can_every_reason_is_given(backends: dict[str, Any]) -> None:
    backends |= {"torch_fast": fake("fast", "too many heads"), "reference": fake("slow", "no float64")}
    with pytest.raises(BackendError, match=r"no back-end can run attend: torch_fast: too many heads; reference: no float64$"):
        ask()


@pytest.mark.parametrize("error", [ImportError("no module"), OSError("no such DLL"), RuntimeError("driver too old")])
def test_a_back_end_that_cannot_be_imported_is_a_reason(backends: dict[str, Any], error: Exception) -> None:
    backends |= {"torch_fast": error, "reference": fake("slow")}
    assert ask() == "slow"
    rows = {row["backend"]: row["status"] for row in registry.status(torch.device("cpu"))}
    assert rows == {"torch_fast": f"{type(error).__name__}: {error}", "reference": "available"}
    with pytest.raises(BackendError, match=str(error)):
        ask("torch_fast")


def test_a_probe_runs_once_and_its_failure_is_a_reason(backends: dict[str, Any]) -> None:
    probed: list[int] = []

    def probe() -> str | None:
        probed.append(1)
        raise RuntimeError("the compiler died")

    backends |= {"torch_fast": fake("fast", probe=probe), "reference": fake("slow")}
    assert [ask() for _ in range(3)] == ["slow"] * 3
    assert probed == [1]
    with pytest.raises(BackendError, match="the compiler died"):
        ask("torch_fast")


def test_a_place_where_a_back_end_does_not_run(backends: dict[str, Any]) -> None:
    def why_not_here(device: torch.device, forced: bool) -> str | None:
        return None if forced else f"it is not used on {device.type}"

    backends |= {"torch_fast": fake("fast", why_not_here=why_not_here), "reference": fake("slow")}
    assert ask() == "slow"
    assert ask("torch_fast") == "fast"


def test_an_op_that_fails_at_run_time_is_not_tried_again(backends: dict[str, Any]) -> None:
    tried: list[int] = []
    package, module = fake("fast")

    def attend(*args: Any) -> str:
        tried.append(1)
        raise OpFailedError("it does not compile")

    module.attend = attend
    backends |= {"torch_fast": (package, module), "reference": fake("slow")}
    assert [ask() for _ in range(3)] == ["slow"] * 3
    assert tried == [1]
    with pytest.raises(BackendError, match="torch_fast: it does not compile"):
        ask("torch_fast")


def test_any_other_error_of_an_op_is_not_hidden(backends: dict[str, Any]) -> None:
    package, module = fake("fast")

    def attend(*args: Any) -> str:
        raise IndexError("a bug")

    module.attend = attend
    backends |= {"torch_fast": (package, module), "reference": fake("slow")}
    with pytest.raises(IndexError, match="a bug"):
        ask()


def test_a_call_that_breaks_the_contract_is_refused_before_anybody_is_asked(backends: dict[str, Any]) -> None:
    backends |= {"torch_fast": fake("fast"), "reference": fake("slow")}
    q, k, v = qkv()
    with pytest.raises(ArgumentError, match="attend: v has shape"):
        registry.call("attend", "auto", q, k, v[:, :2])


def test_the_real_back_ends_are_there(backends: dict[str, Any]) -> None:
    assert [row["status"] for row in registry.status(torch.device("cpu"))] == ["available"] * len(NAMES)
    args = qkv()
    results = [registry.call("attend", name, *args) for name in ("auto", *NAMES)]
    assert all((r - results[0]).abs().max() < 1e-5 for r in results)
    assert registry.call("attend", "auto", *qkv(0)).abs().max() == 0, "without keys the answer is zeros"


def test_the_environment_forces_and_the_node_wins(backends: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    backends |= {"torch_fast": fake("fast"), "reference": fake("slow")}
    monkeypatch.setenv(registry.ENV_BACKEND, "reference")
    assert ask() == "slow"
    assert ask("torch_fast") == "fast"
    monkeypatch.setenv(registry.ENV_BACKEND, "auto")
    assert ask() == "fast"


@pytest.mark.parametrize("by_environment", [False, True])
def test_an_unknown_name_lists_the_known_ones(by_environment: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(registry.ENV_BACKEND, raising=False)
    if by_environment:
        monkeypatch.setenv(registry.ENV_BACKEND, "fancy")
    with pytest.raises(BackendError, match="'fancy' is unknown; choose auto or one of .*torch_fast, reference"):
        ask("auto" if by_environment else "fancy")


def imports_under_threads(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[Any]]:
    """Eight threads ask at once while an import takes its time: the imports made, the answers got."""
    imported: list[str] = []
    answers: list[Any] = []
    start = threading.Barrier(8)

    def slow_import(name: str, package: str | None = None) -> Any:
        imported.append(name)
        time.sleep(0.02)
        return fake("fast")[1]

    def work() -> None:
        start.wait()
        try:
            answers.append(ask())
        except Exception as error:  # without the lock a thread may find half a back-end
            answers.append(error)

    monkeypatch.setattr(registry, "importlib", SimpleNamespace(import_module=slow_import))
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return imported, answers


def test_threads_import_a_back_end_once(backends: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    imported, answers = imports_under_threads(monkeypatch)
    assert imported == [".torch_fast", ".torch_fast.attend"]
    assert answers == ["fast"] * 8


def test_without_the_lock_they_would_not(backends: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_lock", contextlib.nullcontext())
    imported, _ = imports_under_threads(monkeypatch)
    assert len(imported) > 2
