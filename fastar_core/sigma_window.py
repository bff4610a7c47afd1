"""Which steps of a run something is active in: told by sigma, never by counting calls.

A sampler may call the model twice per step, repeat a step or visit sigmas between those of its list; the noise level says where it
stands all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import ConfigError

SLACK = 1e-4
"""Relative: sigmas reach us rounded to float32 or to the model's dtype."""


@dataclass(frozen=True)
class SigmaWindow:
    """Active for low < sigma <= high; sigma 0 (a clean pass) never is."""

    high: float
    low: float

    def __contains__(self, sigma: float) -> bool:
        return sigma > 0 and sigma <= self.high * (1 + SLACK) and sigma > self.low * (1 + SLACK)


def sigma_window(schedule: Sequence[float], start: float, end: float = 1.0) -> SigmaWindow:
    """From the sigma at share ``start`` of the run's own schedule (schedule[round(start * steps)]) to that at share ``end``.

    4 steps at 0.3: all but step 0; 5 levels: all but the first two; 50 steps: from step 15 on. Zeros at the end of the schedule do not
    count. Raises ConfigError for shares outside 0..1 or in the wrong order, and for an empty schedule.
    """
    steps = [s for s in schedule if s > 0]
    if not steps:
        raise ConfigError(f"the schedule {tuple(schedule)} has no step with noise; connect the sigmas of the run")
    if not 0 <= start <= end <= 1:
        raise ConfigError(f"start {start:g} and end {end:g} are shares of the schedule: 0 <= start <= end <= 1")
    first, last = round(start * len(steps)), round(end * len(steps))
    high = steps[first] if first < len(steps) else 0.0
    low = steps[last] if last < len(steps) else 0.0
    return SigmaWindow(high, low)
