"""Where the time of a run goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds by purpose. Nested measurements belong to the inner purpose only, so the parts add up to the total."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self._start = time.monotonic()
        self._inner = 0.0

    @contextmanager
    def measure(self, purpose: str) -> Iterator[None]:
        """Books the time inside the ``with`` under ``purpose``."""
        outer, self._inner = self._inner, 0.0
        begin = time.monotonic()
        try:
            yield
        finally:
            took = time.monotonic() - begin
            self.spent[purpose] += took - self._inner
            self._inner = outer + took

    def split(self) -> dict[str, float]:
        """Seconds of sampling, vae, other (loading, text, files and all that was not measured) and total, rounded."""
        total = time.monotonic() - self._start
        sampling, vae = self.spent["sampling"], self.spent["vae"]
        parts = {"sampling": sampling, "vae": vae, "other": max(0.0, total - sampling - vae), "total": total}
        return {name: round(value, 3) for name, value in parts.items()}
