"""What can be chosen about AnnCA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import ConfigError

KeepRule = Literal["all", "mass", "quant", "lsh"]


@dataclass(frozen=True)
class AnnCASettings:
    """Equal prompt rows are always merged exactly. ``keep`` decides what happens to the others, per latent frame:

    "all" keeps them; "mass": the fewest tokens that hold ``coverage`` of the frame's attention to real tokens, estimated with codes
    of ``bits`` bits (the share kept follows the prompt); "quant": a token stays when it is among the ``probes`` best of some query
    of the frame by codes of ``bits`` bits; "lsh": when it shares the sign hash of some query (``bits`` bits, ``tables`` tables, in
    each the ``probes`` - 1 first bits may differ). Codes of quant and lsh come from full-width queries and keys, or per head with
    the union kept (``per_head``); those of mass are always per head.
    ``min_kept``: never fewer tokens than this, beside the first one and the padding's representative.
    ``start``, ``end``: shares of the run's schedule between which the keep rule acts, found by sigma.
    """

    keep: KeepRule = "all"
    bits: int = 8
    tables: int = 4
    probes: int = 1
    per_head: bool = False
    coverage: float = 0.95
    min_kept: int = 4
    start: float = 0.0
    end: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.keep not in get_args(KeepRule):
            raise ConfigError(f"keep is {self.keep!r}; choose one of {', '.join(get_args(KeepRule))}")
        if not 2 <= self.bits <= 16 or self.tables < 1 or self.probes < 1:
            raise ConfigError(f"bits {self.bits} must be 2 to 16, tables {self.tables} and probes {self.probes} at least 1")
        if not 0 < self.coverage <= 1:
            raise ConfigError(f"coverage is {self.coverage:g}; choose above 0 (few tokens) up to 1 (all)")
        if self.min_kept < 1:
            raise ConfigError(f"min_kept is {self.min_kept}; at least 1 token must stay")
        if not 0 <= self.start <= self.end <= 1:
            raise ConfigError(f"start {self.start:g} and end {self.end:g} are shares of the schedule: 0 <= start <= end <= 1")

    def __deepcopy__(self, memo: dict[int, Any]) -> AnnCASettings:
        return self
