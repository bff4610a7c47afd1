"""Progress: a bar on a terminal, sparse lines elsewhere, and what the line says."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from _runner.progress import Progress
from _runner.talk import Talk, bar_text, clock

pytestmark = pytest.mark.cpu

PROMPT = {
    "1": {"class_type": "Loader", "inputs": {}},
    "2": {"class_type": "FastARStreamingSampler", "inputs": {}, "_meta": {"title": "Stream"}},
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_off_a_terminal_a_line_every_few_seconds() -> None:
    stream = io.StringIO()
    talk = Talk(stream=stream, quiet_s=5.0)
    begin = time.monotonic() + 0.5
    for second in range(13):
        talk.bar(f"at {second}", now=begin + second)
    assert stream.getvalue().split("\n")[:-1] == ["at 5", "at 10"]
    talk.bar("now", now=begin + 12.1, force=True)
    assert stream.getvalue().endswith("now\n")
    assert "\r" not in stream.getvalue()


def test_on_a_terminal_one_line_is_redrawn() -> None:
    stream = Terminal()
    talk = Talk(stream=stream)
    talk.bar("a long line", now=1.0)
    talk.bar("short", now=1.05)
    talk.bar("short", now=2.0)
    talk.say("done")
    assert stream.getvalue() == "\ra long line\rshort      \r     \rdone\n"


def test_a_console_that_cannot_show_a_title_gets_question_marks() -> None:
    raw = io.BytesIO()
    console = io.TextIOWrapper(raw, encoding="ascii")
    Talk(stream=console).say("caf\u00e9")
    assert raw.getvalue() == b"caf?\n"


def test_times_and_bars() -> None:
    assert [clock(value) for value in (0.4, 59.4, 61, 3725)] == ["0 s", "59 s", "1:01 min", "1:02:05 h"]
    assert bar_text(0.5, 4) == "[##--]"
    assert bar_text(7.0, 4) == "[####]"


def make(events: list[tuple[str, dict[str, Any]]]) -> Progress:
    progress = Progress(PROMPT, Talk(stream=io.StringIO()))
    for kind, data in events:
        progress.handle(kind, data)
    return progress


def test_blocks_frames_and_time_left() -> None:
    progress = make(
        [
            ("executing", {"node": "2"}),
            ("progress", {"node": "2", "value": 5, "max": 20}),
            ("fastar.block", {"node": "2", "block": 2, "blocks": 7, "frames": 21, "total_frames": 81}),
        ]
    )
    line = progress.line(progress._node_begin + 10)
    assert line == "[######------------------]  25 % - block 2/7 - frame 21/81 - 30 s left"


def test_other_nodes_show_their_title_and_steps() -> None:
    waiting = make([("status", {"status": {"exec_info": {"queue_remaining": 3}}})])
    assert "3 in the queue" in waiting.line(waiting._begin)
    assert "Loader" in make([("executing", {"node": "1"})]).line(0.0)
    steps = make([("executing", {"node": "1"}), ("progress", {"node": "2", "value": 1, "max": 4})])
    assert "Stream 1/4" in steps.line(steps._node_begin + 1)


def test_the_last_block_is_always_shown() -> None:
    stream = io.StringIO()
    progress = Progress(PROMPT, Talk(stream=stream))
    progress.handle("executing", {"node": "2"})
    progress.handle("fastar.block", {"node": "2", "block": 1, "blocks": 2, "frames": 9, "total_frames": 21})
    assert stream.getvalue() == ""
    progress.handle("fastar.block", {"node": "2", "block": 2, "blocks": 2, "frames": 21, "total_frames": 21})
    assert "block 2/2 - frame 21/21" in stream.getvalue()
