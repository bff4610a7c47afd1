"""Finding and reading workflow files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from _runner.errors import Exit, RunnerError
from _runner.graph import describe, find_workflow, known_workflows, load_workflow
from _runner.watch import failure

pytestmark = pytest.mark.cpu

API = {"1": {"class_type": "A", "inputs": {}, "_meta": {"title": "First"}}}
UI: dict[str, Any] = {"nodes": [], "links": []}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "api").mkdir()
    for path, data in (("api/demo.json", API), ("demo.json", UI), ("only_ui.json", UI)):
        (tmp_path / path).write_text(json.dumps(data), encoding="utf-8")
    return tmp_path


def test_names_prefer_the_api_form(folder: Path) -> None:
    assert list(known_workflows(folder)) == ["demo", "only_ui"]
    assert find_workflow("demo", folder) == folder / "api" / "demo.json"
    assert find_workflow("only_ui.json", folder) == folder / "only_ui.json"
    assert find_workflow(str(folder / "demo.json"), folder) == folder / "demo.json"


def test_a_wrong_name_gets_a_hint(folder: Path) -> None:
    with pytest.raises(RunnerError, match="Did you mean 'demo'") as caught:
        find_workflow("dmo", folder)
    assert caught.value.code == Exit.USAGE


def test_both_forms_are_told_apart(folder: Path) -> None:
    assert load_workflow(folder / "api" / "demo.json").prompt == API
    found = load_workflow(folder / "demo.json")
    assert (found.prompt, found.ui) == (None, UI)
    wrapped = folder / "wrapped.json"
    wrapped.write_text(json.dumps({"prompt": {"1": {"class_type": "A"}}}), encoding="utf-8")
    assert load_workflow(wrapped).prompt == {"1": {"class_type": "A", "inputs": {}}}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"a": 1}', '{"1": {"inputs": {}}}', "\ufeff"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RunnerError, match=r"x\.json") as caught:
        load_workflow(path)
    assert caught.value.code == Exit.USAGE


def test_nodes_are_described_with_title_number_and_class() -> None:
    assert describe(API, "1") == "'First' (node 1, A)"
    assert describe(API, "2", "B") == "node 2 (B)"


@pytest.mark.parametrize(
    ("kind", "end"),
    [("custom_nodes.ComfyUI-FAST-AR.fastar_core.errors.ConfigError", "failed: too big"), ("ValueError", "failed: too big (ValueError)")],
)
def test_only_other_peoples_errors_show_their_class(kind: str, end: str) -> None:
    told = failure(API, {"node_id": 1, "node_type": "A", "exception_message": "too big", "exception_type": kind})
    assert told == f"'First' (node 1, A) {end}"
