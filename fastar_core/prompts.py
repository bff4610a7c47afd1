"""A prompt list as text: one line per prompt, each with the frame or the second from which it holds.

    A red kite over a lake
    # a comment; blank lines are ignored too
    48: the kite dives
    5.5s: snow begins to fall

Frames are pixel frames. A prompt holds from the latent frame in which its pixel frame lies; a sampler that works in
blocks switches at the first block that starts there or later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from .errors import ConfigError
from .geometry import latent_frames_for

_START = re.compile(r"(?P<number>[+-]?\d*\.?\d+|\d+\.)\s*(?P<seconds>s|sec|seconds?)?\s*:(?P<text>.*)", re.IGNORECASE)
_CLOCK = re.compile(r"\d+\s*:\s*\d+(\.\d*)?\s*s?\s*:", re.IGNORECASE)
_FORMS = "write 'frame: text' (for example '48: the kite dives') or 'seconds: text' with an s ('2.5s: the kite dives')"


@dataclass(frozen=True)
class PromptAt:
    """`text` holds from `latent_frame` on; `pixel_frame` is what the line asked for; `line` counts from 1."""

    latent_frame: int
    text: str
    pixel_frame: int
    line: int


def parse_prompt_lines(text: str, fps: float) -> list[PromptAt]:
    """Read a prompt list, sorted by frame; the first prompt starts at frame 0, no two share a latent frame.

    fps: pixel frames per second of the video, for times given in seconds; a time means the frame on screen then.
    Raises ConfigError with the line number.
    """
    if not fps > 0:
        raise ConfigError(f"fps is {fps}, expected a number above 0; set fps to the frame rate of the video")
    prompts: list[PromptAt] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if line and not line.startswith("#"):
            prompts.append(_parse_line(line, number, Fraction(str(fps)), first=not prompts))
    if not prompts:
        raise ConfigError("the prompt list is empty; expected at least one line of text that is not a comment")
    prompts.sort(key=lambda prompt: prompt.latent_frame)
    _check_frames(prompts)
    return prompts


def _parse_line(line: str, number: int, fps: Fraction, *, first: bool) -> PromptAt:
    match = _START.fullmatch(line)
    if match is None:
        if not first:
            raise ConfigError(
                f"prompt list, line {number}: '{_short(line)}' does not say where it starts; {_FORMS}. "
                "A long prompt has to stand on one line"
            )
        return PromptAt(0, line, 0, number)
    if _CLOCK.match(line):
        raise ConfigError(
            f"prompt list, line {number}: '{_short(line)}' looks like minutes and seconds; "
            "write seconds, as in '90s: text'"
        )
    prompt = match["text"].strip()
    if not prompt:
        raise ConfigError(f"prompt list, line {number}: no text after '{line}'; add the prompt or remove the line")
    pixel_frame = _pixel_frame(match["number"], bool(match["seconds"]), number, fps)
    return PromptAt(latent_frames_for(pixel_frame + 1) - 1, prompt, pixel_frame, number)


def _pixel_frame(number: str, in_seconds: bool, line: int, fps: Fraction) -> int:
    value = Fraction(number)
    unit = "second" if in_seconds else "frame"
    if value < 0:
        raise ConfigError(f"prompt list, line {line}: {unit} {number} lies before the video; the first {unit} is 0")
    if in_seconds:
        return int(value * fps)
    if value.denominator != 1:
        raise ConfigError(
            f"prompt list, line {line}: frame {number} is not a whole number; for seconds write '{number}s: text'"
        )
    return int(value)


def _check_frames(prompts: list[PromptAt]) -> None:
    head = prompts[0]
    if head.latent_frame != 0:
        raise ConfigError(
            f"prompt list, line {head.line}: the earliest prompt starts at frame {head.pixel_frame}, so frame 0 has "
            "none; add a line '0: text' (a line whose text begins with a number and a colon needs '0:' in front)"
        )
    for before, after in pairwise(prompts):
        if before.latent_frame == after.latent_frame:
            raise ConfigError(
                f"prompt list, lines {before.line} and {after.line}: frames {before.pixel_frame} and "
                f"{after.pixel_frame} both lie in latent frame {after.latent_frame}; move one by 4 frames or more, "
                "or remove it"
            )


def prompt_table(prompts: list[PromptAt], fps: float) -> str:
    """The list as a Markdown table: seconds, pixel frame, latent frame, text."""
    rows = [
        f"| {p.pixel_frame / fps:.2f} | {p.pixel_frame} | {p.latent_frame} | {p.text.replace('|', '/')} |"
        for p in prompts
    ]
    return "\n".join(["| second | frame | latent frame | prompt |", "| ---: | ---: | ---: | --- |", *rows])


def _short(text: str, limit: int = 40) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
