"""The few lines that the sampler node shows about a finished run."""

from __future__ import annotations

from typing import Any

import pytest

from fastar_pack.fastar_core.report_text import report_in_words, time_in_words

pytestmark = pytest.mark.cpu


def report(**changes: Any) -> dict[str, Any]:
    settings = {"batch": 1, "fps": 16.0, "seed": 7, "cache": {"keeps": "everything"}}
    given = {
        "settings": settings,
        "frames": {"delivered": 193},
        "seconds": {"total": 165.2, "sampling": 157.4, "vae": 7.4},
        "decode": {"mode": "between blocks"},
        "bytes": {"kv_peak": 32_330_752},
        "files": [{"path": "output/video/demo_00001_.mp4", "frames": 193}],
        "warnings": [],
    }
    return {**given, **changes}


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0 s"), (0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (125, "2:05 min"), (3599.6, "1:00:00 h")],
)
def test_times(seconds: float, words: str) -> None:
    assert time_in_words(seconds) == words


def test_a_run_in_words() -> None:
    assert report_in_words(report()).splitlines() == [
        "193 frames (12.1 s), seed 7",
        "2:45 min: model 2:37 min, VAE 7 s (between blocks)",
        "cache: everything, 32.3 MB",
        "saved demo_00001_.mp4, 193 frames",
    ]


def test_rows_windows_and_warnings_are_named() -> None:
    settings = {**report()["settings"], "batch": 2, "cache": {"keeps": "12 latent frames (sink 3)"}}
    text = report_in_words(report(settings=settings, files=[], warnings=["cfg is 1"]))
    assert text.startswith("2 x 193 frames")
    assert "cache: 12 latent frames (sink 3), 32.3 MB" in text
    assert "saved" not in text
    assert text.endswith("note: cfg is 1")
