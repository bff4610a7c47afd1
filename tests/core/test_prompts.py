"""The prompt list: what a line may look like, where its prompt starts, and what each mistake is answered with."""

from __future__ import annotations

import copy

import pytest

from fastar_pack.fastar_core.errors import ConfigError
from fastar_pack.fastar_core.prompts import parse_prompt_lines, prompt_table
from fastar_pack.fastar_core.settings import FastARSettings

pytestmark = pytest.mark.cpu


def starts(text: str, fps: float = 16.0) -> list[tuple[int, str]]:
    return [(p.latent_frame, p.text) for p in parse_prompt_lines(text, fps)]


def test_first_line_without_a_start_holds_from_frame_0() -> None:
    assert starts("a kite\n48: it dives") == [(0, "a kite"), (12, "it dives")]


def test_comments_blank_lines_and_line_ends_do_not_matter() -> None:
    assert starts("# title\r\n\r\n0: a kite\r\n   # note\r\n\n 9 : it dives  ") == [(0, "a kite"), (3, "it dives")]


@pytest.mark.parametrize(
    ("frame", "latent"),
    [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (80, 20), (81, 21)],
)
def test_a_frame_belongs_to_the_latent_frame_that_decodes_it(frame: int, latent: int) -> None:
    assert starts(f"a\n{frame}: b")[1] == (latent, "b")


@pytest.mark.parametrize(
    ("time", "fps", "pixel_frame"),
    [
        ("2.5s", 16.0, 40),
        ("2.5 S", 16.0, 40),
        ("0.29s", 100.0, 29),
        (".5sec", 24.0, 12),
        ("3 seconds", 29.97, 89),
        ("3.s", 16.0, 48),
    ],
)
def test_seconds_mean_the_frame_on_screen_then(time: str, fps: float, pixel_frame: int) -> None:
    assert parse_prompt_lines(f"a\n{time}: b", fps)[1].pixel_frame == pixel_frame


def test_lines_are_sorted_and_colons_in_the_text_stay() -> None:
    assert starts("40: late: very\n0: A cat: it sits (soft:1.2)") == [
        (0, "A cat: it sits (soft:1.2)"),
        (10, "late: very"),
    ]


def test_first_line_may_contain_colons_without_a_start() -> None:
    assert starts("Scene one: a lake\n2s: snow") == [(0, "Scene one: a lake"), (8, "snow")]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "list is empty"),
        ("# only a comment\n\n", "list is empty"),
        ("a\n\nthe kite dives", "line 3: 'the kite dives' does not say where it starts"),
        ("a\n12:  ", "line 2: no text after '12:'"),
        ("a\n2.5: b", "line 2: frame 2.5 is not a whole number; for seconds write '2.5s"),
        ("a\n-3: b", "line 2: frame -3 lies before the video"),
        ("a\n-0.5s: b", "line 2: second -0.5 lies before the video"),
        ("a\n1:30: b", "line 2: '1:30: b' looks like minutes and seconds"),
        ("8: a\n12: b", "line 1: the earliest prompt starts at frame 8"),
        ("a\n9: b\n12: c", "lines 2 and 3: frames 9 and 12 both lie in latent frame 3"),
        ("a\n0: b", "lines 1 and 2: frames 0 and 0 both lie in latent frame 0"),
    ],
)
def test_mistakes_are_named_with_their_line(text: str, fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_prompt_lines(text, 16.0)
    assert fault in str(error.value)


@pytest.mark.parametrize("fps", [0.0, -1.0, float("nan")])
def test_fps_must_be_positive(fps: float) -> None:
    with pytest.raises(ConfigError, match="fps is"):
        parse_prompt_lines("a", fps)


def test_table_states_seconds_frame_and_latent_frame() -> None:
    head, rule, first, second = prompt_table(parse_prompt_lines("a\n2.5s: b | c", 16.0), 16.0).splitlines()
    assert head.count("|") == rule.count("|") == first.count("|") == second.count("|") == 5
    assert [cell.strip() for cell in second.split("|")[1:-1]] == ["2.50", "40", "10", "b / c"]


def test_settings_stay_themselves_in_a_deep_copy() -> None:
    settings = FastARSettings(preset=object())
    options = copy.deepcopy({"fastar": settings})
    assert options["fastar"] is settings
