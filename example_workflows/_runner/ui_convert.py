"""Turns the UI form of a workflow into the API form, with the server's own description of its nodes."""

from __future__ import annotations

from typing import Any

from .errors import Exit, RunnerError
from .graph import Prompt
from .settings import ObjectInfo, choices, input_names, input_spec
from .ui_graph import Link, UiNode, Value, input_source, read_graph, running_nodes

_CONTROLS = ("fixed", "increment", "decrement", "randomize", "increment-wrap")
_UPLOADS = ("image", "video", "audio")
_WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
_SEEDS = ("seed", "noise_seed")
_PYTHON_TYPES: dict[Any, tuple[type, ...]] = {
    "INT": (int, float),
    "FLOAT": (int, float),
    "STRING": (str,),
    "BOOLEAN": (bool,),
}


def to_api(ui: dict[str, Any], info: ObjectInfo) -> Prompt:
    """The API form of `ui`; RunnerError REFUSED for nodes the server lacks, USAGE for values that do not fit."""
    nodes = list(running_nodes(read_graph(ui)))
    check_known({node.type for node in nodes}, info)
    return {node.id: _api_node(node, info) for node in nodes}


def check_known(classes: set[str], info: ObjectInfo) -> None:
    """Raise RunnerError(REFUSED) naming the node classes that the server lacks."""
    unknown = sorted(classes - info.keys())
    if unknown:
        raise RunnerError(
            Exit.REFUSED,
            f"the server does not know these nodes: {', '.join(unknown)}. Install the packs they come from, or look in "
            "the server's log why a pack did not load.",
        )


def _api_node(node: UiNode, info: ObjectInfo) -> dict[str, Any]:
    inputs = {name: _wrapped(value) for name, value in widget_values(node, info).items()}
    for index, entry in enumerate(node.inputs):
        source = input_source(node, index)
        if isinstance(source, Link):
            inputs[entry["name"]] = [source.node, source.slot]
        elif isinstance(source, Value):
            inputs[entry["name"]] = _wrapped(source.value)
    title = node.raw.get("title") or info[node.type].get("display_name") or node.type
    return {"class_type": node.type, "inputs": inputs, "_meta": {"title": title}}


def _wrapped(value: Any) -> Any:
    """A bare list would be read as a connection."""
    return {"__value__": value} if isinstance(value, list) else value


def widget_names(node: UiNode, info: ObjectInfo) -> list[str]:
    """The inputs of a node that are typed in, in the order of its widgets_values."""
    saved = {entry["name"]: entry for entry in node.inputs if entry.get("name")}
    names = []
    for name in input_names(info, node.type):
        spec = input_spec(info, node.type, name)
        kind, options = spec if spec is not None else (None, {})
        plain = (kind in _WIDGETS or isinstance(kind, list)) if not isinstance(kind, dict) else False
        socket_only = name in saved and not saved[name].get("widget") and options.get("defaultInput")
        if (plain and not options.get("forceInput") and not socket_only) or saved.get(name, {}).get("widget"):
            names.append(name)
    return names


def widget_values(node: UiNode, info: ObjectInfo) -> dict[str, Any]:
    """The typed-in values by input name; inputs that the file has no value for get the server's default."""
    names = widget_names(node, info)
    saved = node.raw.get("widgets_values")
    if isinstance(saved, dict):
        values = {name: saved[name] for name in names if name in saved}
    else:
        values = _in_order(node, info, names, list(saved or []))
    for name in names:
        kind, options = input_spec(info, node.type, name) or (None, {})
        if name in values:
            _check(node, name, kind, values[name])
        elif "default" in options:
            values[name] = options["default"]
        elif listed := choices(kind, options):
            values[name] = listed[0]
    return values


def _in_order(node: UiNode, info: ObjectInfo, names: list[str], left: list[Any]) -> dict[str, Any]:
    """Hand out the list; a seed is followed by its control, a file choice may be followed by its upload button."""
    values: dict[str, Any] = {}
    for name in names:
        if not left:
            break
        values[name] = left.pop(0)
        kind, options = input_spec(info, node.type, name) or (None, {})
        controlled = options.get("control_after_generate", kind == "INT" and name in _SEEDS)
        if controlled and left and left[0] in _CONTROLS:
            left.pop(0)
        uploads = any(options.get(f"{medium}_upload") for medium in _UPLOADS)
        if uploads and left and left[0] in _UPLOADS:
            left.pop(0)
    return values


def _check(node: UiNode, name: str, kind: Any, value: Any) -> None:
    wanted = _PYTHON_TYPES.get(kind) if isinstance(kind, str) else None
    wrong = wanted is not None and (not isinstance(value, wanted) or (isinstance(value, bool) and kind != "BOOLEAN"))
    if wrong and value is not None:
        raise RunnerError(
            Exit.USAGE,
            f"node {node.id} ({node.type}): {name} is {value!r} in the file, expected {kind}: the file was made for "
            "another version of this node. Open it in ComfyUI and export it with Workflow > Export (API).",
        )
