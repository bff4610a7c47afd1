"""What a back-end's op accepts, as a record that can say in words why a call is not for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from . import ops

Values = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """``test`` is true for calls the op can take; ``words`` says what it wants, to be read after 'wants '."""

    words: str
    test: Callable[[Values], bool]


@dataclass(frozen=True)
class Limits:
    """Limits of one op. Empty tuples mean 'no limit'; device types and dtypes are those of the op's first tensor."""

    op: str
    devices: tuple[str, ...] = ()
    not_devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    rules: tuple[Rule, ...] = ()
    _defaults: Values = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        parameters = inspect.signature(getattr(ops, self.op)).parameters
        object.__setattr__(self, "_defaults", {name: parameter.default for name, parameter in parameters.items()})

    def why_not(self, *args: Any, **kwargs: Any) -> str | None:
        """One sentence on the first limit that the call breaks, or None."""
        subject = ops.first_tensor(args[0] if args else next(iter(kwargs.values())))
        if self.devices and subject.device.type not in self.devices:
            return f"it runs on {', '.join(self.devices)}, the tensors are on {subject.device.type}"
        if subject.device.type in self.not_devices:
            return f"it does not run on {subject.device.type}"
        if self.dtypes and subject.dtype not in self.dtypes:
            return f"it takes {', '.join(_short(d) for d in self.dtypes)}, the call has {_short(subject.dtype)}"
        if self.rules:
            values = {**self._defaults, **dict(zip(self._defaults, args)), **kwargs}
            for rule in self.rules:
                if not rule.test(values):
                    return f"it wants {rule.words}"
        return None

    def words(self) -> str:
        """The limits in one line, for the status table."""
        parts = [f"on {', '.join(self.devices)}"] if self.devices else []
        parts += [f"not on {', '.join(self.not_devices)}"] if self.not_devices else []
        parts += [f"types {', '.join(_short(d) for d in self.dtypes)}"] if self.dtypes else []
        return "; ".join(parts + [rule.words for rule in self.rules]) or "no limits"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
