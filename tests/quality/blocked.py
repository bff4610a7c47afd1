"""Pretends that libraries or parts of the pack cannot be imported, in the three ways that real installations show."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

import pytest

BREAKAGES = (
    ImportError("No module named 'it'"),
    OSError("libcudart.so.12: cannot open shared object file"),
    RuntimeError("operator it::it does not exist"),
)


class _Blocker(MetaPathFinder):
    def __init__(self, names: tuple[str, ...], error: Exception) -> None:
        self.names = names
        self.error = error

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> None:
        """Raise for the blocked names and what lies below them; leave everything else to the next finder."""
        if any(fullname == name or fullname.startswith(name + ".") for name in self.names):
            raise self.error


def block(monkeypatch: pytest.MonkeyPatch, error: Exception, *names: str) -> None:
    """Until the test ends, importing one of `names` raises `error`."""
    for loaded in list(sys.modules):
        if any(loaded == name or loaded.startswith(name + ".") for name in names):
            monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [_Blocker(names, error), *sys.meta_path])


def forget(alias: str) -> None:
    """Drop a pack that was loaded under `alias` for one test."""
    for loaded in list(sys.modules):
        if loaded == alias or loaded.startswith(alias + "."):
            del sys.modules[loaded]
