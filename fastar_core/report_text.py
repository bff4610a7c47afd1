"""The run report in a few lines for people; the full report is JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .decode_plan import in_words


def time_in_words(seconds: float) -> str:
    """"48 s", "2:05 min", "1:02:05 h"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


def report_in_words(report: Mapping[str, Any]) -> str:
    """A line each for the video, the time, the cache, the files and every warning of a sampler's report."""
    settings, frames, seconds = report["settings"], report["frames"], report["seconds"]
    rows = f"{settings['batch']} x " if settings["batch"] > 1 else ""
    spent = f"{time_in_words(seconds['total'])}: model {time_in_words(seconds['sampling'])}"
    lines = [
        f"{rows}{frames['delivered']} frames ({frames['delivered'] / settings['fps']:.1f} s), seed {settings['seed']}",
        f"{spent}, VAE {time_in_words(seconds['vae'])} ({report['decode']['mode']})",
        f"cache: {settings['cache']['keeps']}, {in_words(int(report['bytes']['kv_peak']))}",
    ]
    lines += [f"saved {Path(file['path']).name}, {file['frames']} frames" for file in report["files"]]
    return "\n".join([*lines, *(f"note: {text}" for text in report["warnings"])])
