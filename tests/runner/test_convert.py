"""UI form to API form: widgets in order, links through whatever lies between, subgraphs."""

from __future__ import annotations

from typing import Any

import pytest
from _runner.errors import Exit, RunnerError
from _runner.ui_convert import to_api

from runner.info import INFO

pytestmark = pytest.mark.cpu

SAMPLER_VALUES = [640, 33, 5, "fixed", 1.5, True, "hello"]


def ui_node(
    number: int, kind: str, values: Any = None, inputs: Any = (), outputs: Any = (), **more: Any
) -> dict[str, Any]:
    """`inputs`: (name, type, link) or (name, type, link, widget name); `outputs`: types."""
    entries = []
    for name, kind_of_input, link, *widget in inputs:
        entry = {"name": name, "type": kind_of_input, "link": link}
        entries.append({**entry, "widget": {"name": widget[0]}} if widget else entry)
    made = {"id": number, "type": kind, "mode": 0, "inputs": entries, "outputs": [{"type": kind} for kind in outputs]}
    return {**made, "widgets_values": values if values is not None else [], **more}


def sampler(model: int | None = 1, **more: Any) -> dict[str, Any]:
    inputs = [("model", "MODEL", model), ("positive", "CONDITIONING", None), *more.pop("inputs", [])]
    return ui_node(2, "FastARStreamingSampler", more.pop("values", SAMPLER_VALUES), inputs, ["IMAGE"], **more)


def graph(*nodes: dict[str, Any], links: Any, **more: Any) -> dict[str, Any]:
    return {"nodes": list(nodes), "links": links, **more}


LOADER = ui_node(1, "Loader", ["b.safetensors", "fp8"], outputs=["MODEL"])
LINK = [1, 1, 0, 2, 0, "MODEL"]


def test_widgets_and_links() -> None:
    note = ui_node(8, "MarkdownNote", ["text"])
    prompt = to_api(graph(LOADER, sampler(title="My sampler"), note, links=[LINK]), INFO)
    assert prompt == {
        "1": {
            "class_type": "Loader",
            "inputs": {"file": "b.safetensors", "dtype": "fp8"},
            "_meta": {"title": "Loader"},
        },
        "2": {
            "class_type": "FastARStreamingSampler",
            "inputs": {
                "width": 640, "length": 33, "seed": 5, "cfg": 1.5, "to_file": True, "note": "hello", "model": ["1", 0],
            },
            "_meta": {"title": "My sampler"},
        },
    }  # fmt: skip


def test_the_control_after_a_seed_is_no_value() -> None:
    for control in ("fixed", "increment", "decrement", "randomize"):
        prompt = to_api(graph(sampler(None, values=[640, 33, 5, control, 1.5, True, "x"]), links=[]), INFO)
        assert prompt["2"]["inputs"]["cfg"] == 1.5
    without = to_api(graph(sampler(None, values=[640, 33, 5, 1.5, True, "x"]), links=[]), INFO)
    assert without["2"]["inputs"]["cfg"] == 1.5
    by_name = to_api(graph(ui_node(1, "KSampler", [3, "randomize", 8]), links=[]), INFO)
    assert by_name["1"]["inputs"] == {"seed": 3, "steps": 8}


def test_a_converted_widget_keeps_its_place_and_takes_the_link() -> None:
    number = ui_node(5, "PrimitiveInt", [99], outputs=["INT"])
    node = sampler(inputs=[("length", "INT", 2, "length"), ("seed", "INT", None, "seed"), ("forced", "INT", 3)])
    links = [LINK, [2, 5, 0, 2, 2, "INT"], [3, 5, 0, 2, 4, "INT"]]
    inputs = to_api(graph(LOADER, number, node, links=links), INFO)["2"]["inputs"]
    assert inputs["length"] == ["5", 0]
    assert inputs["forced"] == ["5", 0]
    assert (inputs["width"], inputs["seed"], inputs["cfg"]) == (640, 5, 1.5)


def test_a_primitive_gives_its_value() -> None:
    primitive = ui_node(5, "PrimitiveNode", [77, "fixed"], outputs=["INT"])
    node = sampler(inputs=[("length", "INT", 2, "length")])
    prompt = to_api(graph(LOADER, primitive, node, links=[LINK, [2, 5, 0, 2, 2, "INT"]]), INFO)
    assert prompt["2"]["inputs"]["length"] == 77
    assert set(prompt) == {"1", "2"}


def test_reroutes_are_followed() -> None:
    links = [[1, 1, 0, 6, 0, "MODEL"], [2, 6, 0, 7, 0, "*"], [3, 7, 0, 2, 0, "*"]]
    reroutes = [ui_node(number, "Reroute", inputs=[("", "*", number - 5)], outputs=["MODEL"]) for number in (6, 7)]
    prompt = to_api(graph(LOADER, *reroutes, sampler(3), links=links), INFO)
    assert prompt["2"]["inputs"]["model"] == ["1", 0]
    assert set(prompt) == {"1", "2"}


def chain(mode: int) -> dict[str, Any]:
    load = ui_node(1, "LoadImage", ["in.png", "image"], outputs=["IMAGE"])
    scale = ui_node(2, "Scale", [3.0], [("by", "FLOAT", None, "by"), ("image", "IMAGE", 1)], ["IMAGE"], mode=mode)
    save = ui_node(3, "Save", ["out"], [("image", "IMAGE", 2)])
    return graph(load, scale, save, links=[[1, 1, 0, 2, 1, "IMAGE"], [2, 2, 0, 3, 0, "IMAGE"]])


def test_bypassed_and_muted_nodes() -> None:
    assert to_api(chain(0), INFO)["3"]["inputs"]["image"] == ["2", 0]
    bypassed = to_api(chain(4), INFO)
    assert bypassed["3"]["inputs"] == {"prefix": "out", "image": ["1", 0]}
    assert set(bypassed) == {"1", "3"}
    muted = to_api(chain(2), INFO)
    assert muted["3"]["inputs"] == {"prefix": "out"}
    assert set(muted) == {"1", "3"}


def test_an_upload_button_is_no_value() -> None:
    assert to_api(chain(0), INFO)["1"]["inputs"] == {"image": "in.png"}


def test_missing_values_are_the_servers_defaults() -> None:
    inputs = to_api(graph(sampler(None, values=[640]), links=[]), INFO)["2"]["inputs"]
    assert inputs == {"width": 640, "length": 81, "seed": 0, "cfg": 1.0, "to_file": False, "note": "none"}
    named = to_api(graph(sampler(None, values={"cfg": 2.0, "gone": 1}), links=[]), INFO)["2"]["inputs"]
    assert named["cfg"] == 2.0
    assert "gone" not in named
    assert to_api(graph(ui_node(1, "Loader", []), links=[]), INFO)["1"]["inputs"]["file"] == "a.safetensors"


def test_widgets_of_other_packs_are_known_by_the_file() -> None:
    node = ui_node(1, "Points", [[[1, 2]], 4], [("points", "POINTS", None, "points")])
    assert to_api(graph(node, links=[]), INFO)["1"]["inputs"] == {"points": {"__value__": [[1, 2]]}, "count": 4}


def subgraph(values: Any, widget_link: int | None) -> dict[str, Any]:
    """Node 7 is a subgraph that holds a sampler and, inside a second one, the loader."""
    inner = {
        "id": "loads", "inputs": [], "outputs": [{"name": "MODEL"}],
        "nodes": [ui_node(1, "Loader", ["a.safetensors", "fp8"], outputs=["MODEL"])],
        "links": [{"id": 1, "origin_id": 1, "origin_slot": 0, "target_id": -20, "target_slot": 0}],
    }  # fmt: skip
    outer = {
        "id": "samples", "inputs": [{"name": "length"}], "outputs": [{"name": "IMAGE"}],
        "nodes": [ui_node(1, "loads", outputs=["MODEL"]), sampler(inputs=[("length", "INT", 2, "length")])],
        "links": [
            {"id": 1, "origin_id": 1, "origin_slot": 0, "target_id": 2, "target_slot": 0},
            {"id": 2, "origin_id": -10, "origin_slot": 0, "target_id": 2, "target_slot": 2},
            {"id": 3, "origin_id": 2, "origin_slot": 0, "target_id": -20, "target_slot": 0},
        ],
    }  # fmt: skip
    nodes = [
        ui_node(7, "samples", values, [("length", "INT", widget_link, "length")], ["IMAGE"]),
        ui_node(3, "Save", ["out"], [("image", "IMAGE", 9)]),
        ui_node(5, "PrimitiveInt", [12], outputs=["INT"]),
    ]
    links = [[9, 7, 0, 3, 0, "IMAGE"], [10, 5, 0, 7, 0, "INT"]]
    return graph(*nodes, links=links, definitions={"subgraphs": [outer, inner]})


def test_subgraphs_are_opened() -> None:
    prompt = to_api(subgraph([55], None), INFO)
    assert set(prompt) == {"3", "5", "7:2", "7:1:1"}
    assert prompt["3"]["inputs"]["image"] == ["7:2", 0]
    assert prompt["7:2"]["inputs"]["model"] == ["7:1:1", 0]
    assert prompt["7:2"]["inputs"]["length"] == 55
    assert to_api(subgraph([], None), INFO)["7:2"]["inputs"]["length"] == 33
    assert to_api(subgraph([55], 10), INFO)["7:2"]["inputs"]["length"] == ["5", 0]


def test_unknown_nodes_are_named_all_at_once() -> None:
    with pytest.raises(RunnerError, match="Alien, Other") as caught:
        to_api(graph(ui_node(1, "Other"), ui_node(2, "Alien"), ui_node(3, "Reroute"), links=[]), INFO)
    assert caught.value.code == Exit.REFUSED


def test_values_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RunnerError, match="cfg is 'x' in the file, expected FLOAT"):
        to_api(graph(sampler(None, values=[640, 33, 5, "fixed", "x", True, "hello"]), links=[]), INFO)


def test_circles_are_refused() -> None:
    reroutes = [ui_node(number, "Reroute", inputs=[("", "*", number)], outputs=["*"]) for number in (1, 3)]
    links = [[1, 3, 0, 1, 0, "*"], [3, 1, 0, 3, 0, "*"]]
    with pytest.raises(RunnerError, match="circle"):
        to_api(graph(*reroutes, sampler(3), links=links), INFO)
