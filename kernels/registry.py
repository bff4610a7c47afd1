"""Chooses a back-end per call: forced by the run or FASTAR_BACKEND, else the first that accepts the call.

A back-end is a package with one module per op. Each op module has the op's function and ``why_not(*args) -> str | None``, a
sentence that says why this call is not for it. Back-ends are imported once; a failure is kept as a reason, never raised.
"""

from __future__ import annotations

import importlib
import os
import threading
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

PRIORITY = ("torch_fast", "reference")
OPS = ("attend",)
ENV_BACKEND = "FASTAR_BACKEND"


class BackendError(ValueError):
    """No back-end accepts a call; the message gives one reason per back-end."""


@dataclass
class _Probe:
    modules: dict[str, ModuleType] = field(default_factory=dict)
    reason: str | None = None


_lock = threading.Lock()
_probes: dict[str, _Probe] = {}


def _probe(name: str) -> _Probe:
    """Imports a back-end on first use; what was found is immutable afterwards, so it is shared by all runs."""
    with _lock:
        if name not in _probes:
            probe = _Probe()
            try:
                for op in OPS:
                    probe.modules[op] = importlib.import_module(f".{name}.{op}", __package__)
            except Exception as error:  # an unusable library may fail with anything, OSError from a missing DLL included
                probe = _Probe(reason=f"{type(error).__name__}: {error}")
            _probes[name] = probe
        return _probes[name]


def forced_backend(requested: str) -> str | None:
    """The back-end a run must use: the node's choice, else the environment variable, else None."""
    name = requested if requested != "auto" else os.environ.get(ENV_BACKEND, "auto")
    if name == "auto":
        return None
    if name not in PRIORITY:
        raise BackendError(f"back-end {name!r} is unknown; choose auto or one of {', '.join(PRIORITY)}")
    return name


def call(op: str, backend: str, *args: Any) -> Any:
    """Runs ``op`` on the forced back-end or on the first that accepts the arguments. Raises BackendError otherwise."""
    forced = forced_backend(backend)
    reasons = []
    for name in (forced,) if forced else PRIORITY:
        probe = _probe(name)
        reason = probe.reason if probe.reason else probe.modules[op].why_not(*args)
        if reason is None:
            return getattr(probe.modules[op], op)(*args)
        reasons.append(f"{name}: {reason}")
    hint = f"; choose another back-end than {forced!r}" if forced else ""
    raise BackendError(f"no back-end can run {op}: {'; '.join(reasons)}{hint}")


def status() -> list[dict[str, str]]:
    """One row per back-end: name, 'available' or the reason why it is not."""
    return [{"backend": name, "status": _probe(name).reason or "available"} for name in PRIORITY]
