"""--set, --frames and --seed: which node, which type, which range."""

from __future__ import annotations

from typing import Any

import pytest
from _runner import cli
from _runner.errors import Exit, RunnerError
from _runner.settings import assign, parse_value, set_frames, set_seed, split_assignment

from runner.info import INFO

pytestmark = pytest.mark.cpu


def make_prompt() -> dict[str, Any]:
    return {
        "1": {
            "class_type": "Loader",
            "inputs": {"file": "a.safetensors", "dtype": "default"},
            "_meta": {"title": "v1.5 model"},
        },
        "2": {"class_type": "FastARStreamingSampler", "inputs": {"model": ["1", 0], "length": 81, "seed": 0}},
        "3": {"class_type": "Encode", "inputs": {"text": "a", "clip": ["1", 1]}, "_meta": {"title": "Positive"}},
        "4": {"class_type": "Encode", "inputs": {"text": "b", "clip": ["1", 1]}, "_meta": {"title": "Negative"}},
    }


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("3.text=a = b.c", ("3", "text", "a = b.c")),
        ("v1.5 model.file=x", ("v1.5 model", "file", "x")),
        ("2.seed=", ("2", "seed", "")),
    ],
)
def test_assignments_are_split(text: str, parts: tuple[str, str, str]) -> None:
    assert split_assignment(text) == parts


@pytest.mark.parametrize("text", ["", "seed=1", "2.seed", ".seed=1", "2.=1"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(RunnerError, match=r"node\.input=value") as caught:
        split_assignment(text)
    assert caught.value.code == Exit.USAGE


@pytest.mark.parametrize(
    ("text", "node", "name", "value"),
    [
        ("2.seed=18446744073709551615", "2", "seed", 2**64 - 1),
        ("FastARStreamingSampler.cfg=4", "2", "cfg", 4.0),
        ("fastarstreamingsampler.to_file=Yes", "2", "to_file", True),
        ("2.to_file=0", "2", "to_file", False),
        ("v1.5 model.file=b.safetensors", "1", "file", "b.safetensors"),
        ("Loader.dtype=fp8", "1", "dtype", "fp8"),
        ("positive.text=5 cats, x=y", "3", "text", "5 cats, x=y"),
        ("2.note=", "2", "note", ""),
    ],
)
def test_values_get_the_type_of_the_input(text: str, node: str, name: str, value: Any) -> None:
    prompt = make_prompt()
    assign(prompt, INFO, text)
    found = prompt[node]["inputs"][name]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2.seed=1.5", "whole number"),
        ("2.cfg=high", "a number"),
        ("2.cfg=nan", "expected 0.0 to 30.0"),
        ("2.length=0", "1 to 100000"),
        ("2.to_file=maybe", "true or false"),
        ("Loader.file=c.safetensors", "a.safetensors, b.safetensors"),
        ("2.model=x", "connection of type MODEL"),
        ("2.lenght=5", "no input 'lenght', but model, positive, width, length"),
        ("9.seed=1", "no node '9'"),
        ("Encode.text=x", "names 2 nodes: 'Positive' \\(node 3, Encode\\), 'Negative'"),
    ],
)
def test_wrong_values_are_explained(text: str, says: str) -> None:
    prompt = make_prompt()
    with pytest.raises(RunnerError, match=says) as caught:
        assign(prompt, INFO, text)
    assert caught.value.code == Exit.USAGE
    assert prompt == make_prompt()


def test_long_lists_of_choices_are_cut() -> None:
    listed = [f"model_{number:03d}" for number in range(100)]
    with pytest.raises(RunnerError, match=r"and \d+ more") as caught:
        parse_value("model_0055", listed, {}, "file")
    assert "model_055" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_frames_and_seed_reach_the_sampler() -> None:
    prompt = make_prompt()
    set_frames(prompt, INFO, 33)
    set_seed(prompt, INFO, 7)
    assert prompt["2"]["inputs"] == {"model": ["1", 0], "length": 33, "seed": 7}


def test_frames_and_seed_reach_stock_nodes() -> None:
    prompt = {
        "1": {"class_type": "EmptyVideo", "inputs": {"length": 81, "size": 8}},
        "2": {"class_type": "KSampler", "inputs": {"seed": 1, "steps": 20}},
        "3": {"class_type": "KSampler", "inputs": {"seed": 2, "steps": 20}},
    }
    set_frames(prompt, INFO, 33)
    set_seed(prompt, INFO, 7)
    assert prompt["1"]["inputs"] == {"length": 33, "size": 8}
    assert [prompt[node]["inputs"]["seed"] for node in "23"] == [7, 7]


def test_a_number_node_in_between_is_set_instead() -> None:
    prompt = make_prompt()
    prompt["5"] = {"class_type": "PrimitiveInt", "inputs": {"value": 5}}
    prompt["2"]["inputs"]["length"] = ["5", 0]
    set_frames(prompt, INFO, 33)
    assert prompt["5"]["inputs"]["value"] == 33
    assert prompt["2"]["inputs"]["length"] == ["5", 0]
    prompt["2"]["inputs"]["length"] = ["1", 0]
    with pytest.raises(RunnerError, match="comes from another node"):
        set_frames(prompt, INFO, 33)


def test_without_a_place_for_them_they_are_refused() -> None:
    prompt = {"1": {"class_type": "Loader", "inputs": {}}}
    with pytest.raises(RunnerError, match="no FastARStreamingSampler"):
        set_frames(prompt, INFO, 5)
    with pytest.raises(RunnerError, match="no node of this workflow has a seed"):
        set_seed(prompt, INFO, 5)
    with pytest.raises(RunnerError, match="1 to 100000"):
        set_frames(make_prompt(), INFO, 100_001)


def test_typing_errors_are_found_before_a_server_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--set", "seed", "--host", "127.0.0.1:1"]) == Exit.USAGE
    for option, value, words in (("--frames", "x", "'x' is no whole number"), ("--seed", "-1", "-1 is below 0"),
                                 ("--timeout", "soon", "'soon' is no number"), ("--timeout", "nan", "nan is not above 0")):
        with pytest.raises(SystemExit) as caught:
            cli.main([option, value])
        assert caught.value.code == Exit.USAGE
        assert f"{option}: {words}" in capsys.readouterr().err
