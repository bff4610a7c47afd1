"""AnnSA's settings and counts as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError


def parse_layers(text: str) -> tuple[int, ...]:
    """Layer numbers of a list such as "0, 3, 27-29", ascending. Raises ConfigError with the part that is no number."""
    found: set[int] = set()
    for part in text.replace(";", ",").split(","):
        low, _, high = part.strip().partition("-")
        if not low:
            continue
        if not low.strip().isdigit() or (high and not high.strip().isdigit()):
            raise ConfigError(f"dense_layers: '{part.strip()}' is not a layer; expected numbers from 0 on and ranges, for example "
                              "0, 3, 27-29")
        found.update(range(int(low), int(high or low) + 1))
    return tuple(sorted(found))


def annsa_in_words(report: Mapping[str, Any]) -> str:
    """What a run did, in a line or two: calls, density, why others stayed dense, the layers that calibrating found."""
    told = report.get("annsa", report)
    calls = dict(told.get("calls", {}))
    sparse = calls.pop("sparse", 0)
    lines = [f"{sparse} sparse calls" + (f" at density {told['density']:.3f}" if "density" in told else "")]
    lines += [f"{count} {reason}" for reason, count in calls.items()]
    if report.get("masked_calls"):
        lines.append(f"{report['masked_calls']} dense: masked")
    if "keep_dense" in told:
        worst = min(told["layer_recall"].values())
        layers = ", ".join(map(str, told["keep_dense"])) or "none"
        lines.append(f"lowest mass kept by a layer {worst:.3f}; dense_layers: {layers}")
    return "\n".join(lines)
