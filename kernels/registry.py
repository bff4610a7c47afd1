"""Chooses a back-end per call: forced by the run or FASTAR_BACKEND, else the first that accepts the call.

A back-end is a package with one module per op. An op module has the op's function and ``why_not(*args) -> str | None``, a
sentence that says why this call is not for it (constraints.Limits writes it). The package may have ``why_not_here(device,
forced)``, asked at each call and cheap, and ``probe()``, asked once and allowed to be slow; both give a reason or None. What
cannot be imported, probed or compiled is kept as a reason and never raised, unless nobody else can run the call.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from . import knobs, ops

logger = logging.getLogger(__name__)

PRIORITY = ("triton", "flashinfer", "torch_fast", "reference")
OPS = ops.OPS
ENV_BACKEND = knobs.BACKEND


class BackendError(ValueError):
    """No back-end accepts a call; the message gives one reason per back-end."""


class OpFailedError(RuntimeError):
    """Raised by a back-end whose op turns out not to work on this machine (it does not compile, it does not fit)."""


@dataclass
class _Backend:
    """What is known about one back-end. Reasons are only added, so all runs of the process share it."""

    package: ModuleType | None = None
    reason: str | None = None
    probed: bool = False
    modules: dict[str, ModuleType] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # op -> why it cannot be used


_lock = threading.RLock()
_backends: dict[str, _Backend] = {}


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _backend(name: str) -> _Backend:
    """Imports the package of a back-end on first use (its ops come later, its libraries last)."""
    with _lock:
        if name not in _backends:
            found = _Backend()
            try:
                found.package = importlib.import_module(f".{name}", __package__)
            except Exception as error:  # an unusable library may fail with anything, OSError from a missing DLL included
                found.reason = _words(error)
            _backends[name] = found
        return _backends[name]


def _unusable(name: str, device: torch.device, forced: bool) -> str | None:
    """Why the back-end cannot be used for tensors on ``device`` at all; probes it on first need and logs what that finds."""
    backend = _backend(name)
    if backend.reason is not None:
        return backend.reason
    here = getattr(backend.package, "why_not_here", None)
    reason = here(device, forced) if here else None
    if reason is not None:
        return reason
    with _lock:
        if not backend.probed:
            probe = getattr(backend.package, "probe", None)
            try:
                backend.reason = probe() if probe else None
            except Exception as error:  # a probe runs foreign compilers and drivers; what they raise is not listed anywhere
                backend.reason = _words(error)
            backend.probed = True
            if backend.reason is not None:
                logger.info("FAST-AR: kernels of %s are not available: %s", name, backend.reason)
        return backend.reason


def _module(name: str, backend: _Backend, op: str) -> ModuleType | None:
    """The module of an op, or None with the reason kept in ``failed``."""
    with _lock:
        if op not in backend.modules and op not in backend.failed:
            try:
                backend.modules[op] = importlib.import_module(f".{name}.{op}", __package__)
            except ModuleNotFoundError as error:
                missing = str(error.name).endswith(f".{name}.{op}")
                backend.failed[op] = f"it does not have {op}" if missing else _words(error)
            except Exception as error:  # as above
                backend.failed[op] = _words(error)
        return None if op in backend.failed else backend.modules[op]


def forced_backend(requested: str) -> str | None:
    """The back-end a run must use: the node's choice, else the environment variable, else None."""
    name = requested if requested != "auto" else os.environ.get(ENV_BACKEND, "auto")
    if name == "auto":
        return None
    if name not in PRIORITY:
        raise BackendError(f"back-end {name!r} is unknown; choose auto or one of {', '.join(PRIORITY)}")
    return name


def unavailable(name: str, device: torch.device, forced: bool = False) -> str | None:
    """Why back-end ``name`` cannot be used at all for tensors on ``device``, or None; ``forced`` as if it had been asked for."""
    return _unusable(name, device, forced)


def why_not(name: str, op: str, *args: Any, forced: bool = False, **kwargs: Any) -> str | None:
    """Why back-end ``name`` cannot run this call, in words, or None when it can."""
    backend = _backend(name)
    device = ops.first_tensor(args[0] if args else next(iter(kwargs.values()))).device
    reason = _unusable(name, device, forced)
    if reason is not None:
        return reason
    module = _module(name, backend, op)
    return backend.failed[op] if module is None else module.why_not(*args, **kwargs)


def call(op: str, backend: str, *args: Any, **kwargs: Any) -> Any:
    """Runs ``op`` (see ops.py) on the forced back-end or on the first that accepts the arguments.

    Raises ops.ArgumentError for a call that breaks the op's contract, BackendError when no back-end can run it.
    """
    getattr(ops, op)(*args, **kwargs)
    forced = forced_backend(backend)
    reasons = []
    for name in (forced,) if forced else PRIORITY:
        reason = why_not(name, op, *args, forced=forced is not None, **kwargs)
        if reason is None:
            found = _backend(name)
            try:
                return getattr(found.modules[op], op)(*args, **kwargs)
            except OpFailedError as error:
                reason = str(error)
                with _lock:
                    known = op in found.failed
                    found.failed[op] = reason
                if not known:
                    logger.warning("FAST-AR: %s cannot run %s here: %s", name, op, reason)
        reasons.append(f"{name}: {reason}")
    hint = f"; choose another back-end than {forced!r}" if forced else ""
    raise BackendError(f"no back-end can run {op}: {'; '.join(reasons)}{hint}")


def _default_device() -> torch.device:
    return torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")


def status(device: torch.device | None = None) -> list[dict[str, str]]:
    """One row per back-end: its name, 'available' or the reason why it is not, and its ops with what they accept.

    ``device`` is where the tensors would be; without it the CUDA device if there is one, else the CPU.
    """
    rows = []
    for name in PRIORITY:
        backend = _backend(name)
        reason = _unusable(name, device or _default_device(), forced_backend("auto") == name)
        accepted = []
        for op in OPS if reason is None else ():
            module = _module(name, backend, op)
            limits = getattr(module, "LIMITS", None)
            accepted.append(f"{op}: {limits.words() if limits else backend.failed.get(op, 'no limits')}")
        rows.append({"backend": name, "status": reason or "available", "ops": "\n".join(accepted)})
    return rows


def summary(requested: str = "auto", device: torch.device | None = None) -> str:
    """One line for the log of a run: who computes, and why the others do not."""
    forced = forced_backend(requested)
    rows = status(device)
    usable = [row["backend"] for row in rows if row["status"] == "available"]
    others = [f"{row['backend']}: {row['status']}" for row in rows if row["status"] != "available"]
    chosen = forced or usable[0]
    tail = f" (not used: {'; '.join(others)})" if others else ""
    return f"kernels: {chosen}{', as asked for' if forced else ''}{tail}"
