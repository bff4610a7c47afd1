"""The node around the prompt list, with a text encoder that records what it is asked."""

from __future__ import annotations

from typing import Any

import pytest

from fastar_pack.fastar_core.errors import ConfigError
from fastar_pack.nodes.prompts import FastARPrompts

pytestmark = pytest.mark.cpu


class RecordingClip:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def tokenize(self, text: str) -> str:
        self.texts.append(text)
        return f"<{text}>"

    def encode_from_tokens_scheduled(self, tokens: str) -> list[Any]:
        return [[tokens, {}]]


def test_each_text_is_encoded_once_and_keeps_its_frame() -> None:
    clip = RecordingClip()
    prompts, table, first = FastARPrompts().encode(clip, "at lake\n48: at hill\n96: at lake", 16.0)
    assert prompts == [(0, [["<at lake>", {}]]), (12, [["<at hill>", {}]]), (24, [["<at lake>", {}]])]
    assert clip.texts == ["at lake", "at hill"]
    assert len(table.splitlines()) == 2 + 3
    assert first is prompts[0][1]


def test_syntax_errors_are_reported_before_the_run() -> None:
    assert "line 2" in str(FastARPrompts.VALIDATE_INPUTS("a\nb", 16.0))
    assert FastARPrompts.VALIDATE_INPUTS("a\n8: b", 16.0) is True


def test_linked_inputs_are_left_to_the_run() -> None:
    assert FastARPrompts.VALIDATE_INPUTS(None, 16.0) is True
    with pytest.raises(ConfigError, match="line 2"):
        FastARPrompts().encode(RecordingClip(), "a\nb", 16.0)


def test_a_missing_encoder_is_named() -> None:
    with pytest.raises(ConfigError, match="no text encoder"):
        FastARPrompts().encode(None, "a", 16.0)
