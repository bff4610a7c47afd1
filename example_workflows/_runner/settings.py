"""--set, --frames and --seed: values from the command line, checked against what the server says about each node."""

from __future__ import annotations

import difflib
from typing import Any

from .errors import Exit, RunnerError
from .graph import Prompt, describe, find_node, is_link, sources

SAMPLER = "FastARStreamingSampler"
SEEDS = ("seed", "noise_seed")
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")
_SHOWN = 12
ObjectInfo = dict[str, Any]


def split_assignment(text: str) -> tuple[str, str, str]:
    """'node.input=value' -> (node, input, value); the value may hold anything, the node's title may hold dots."""
    left, equals, value = text.partition("=")
    node, dot, name = left.rpartition(".")
    if not (equals and dot and node.strip() and name.strip()):
        raise RunnerError(
            Exit.USAGE, f"--set '{text}': expected node.input=value, where node is a number, class or title"
        )
    return node.strip(), name.strip(), value


def input_spec(info: ObjectInfo, class_type: str, name: str) -> tuple[Any, dict[str, Any]] | None:
    """(type, options) of one input as the server describes it; None when it has no such input."""
    declared = info.get(class_type, {}).get("input", {})
    for group in ("required", "optional"):
        entry = declared.get(group, {}).get(name)
        if entry is not None:
            return entry[0], entry[1] if len(entry) > 1 and isinstance(entry[1], dict) else {}
    return None


def input_names(info: ObjectInfo, class_type: str) -> list[str]:
    """All inputs of a class, in the server's order."""
    declared = info.get(class_type, {}).get("input", {})
    order = info.get(class_type, {}).get("input_order") or {}
    return [name for group in ("required", "optional") for name in order.get(group) or declared.get(group, {})]


def choices(kind: Any, options: dict[str, Any]) -> list[Any] | None:
    """The values of a choice input, None for other inputs and for choices the server does not list."""
    if isinstance(kind, list):
        return kind
    if kind == "COMBO":
        return options.get("options")
    return None


def parse_value(text: str, kind: Any, options: dict[str, Any], where: str) -> Any:
    """Turn text into the type the input takes; raises RunnerError(USAGE) naming what is expected."""
    listed = choices(kind, options)
    if listed is not None:
        return _choice(text, listed, where)
    if kind in ("INT", "FLOAT"):
        return _number(text, kind, options, where)
    if kind == "BOOLEAN":
        folded = text.strip().casefold()
        if folded in _TRUE or folded in _FALSE:
            return folded in _TRUE
        raise RunnerError(Exit.USAGE, f"{where} is '{text}': expected true or false")
    if kind in ("STRING", "COMBO"):
        return text
    raise RunnerError(
        Exit.USAGE, f"{where} takes a connection of type {kind}, no value; change the workflow file instead"
    )


def _choice(text: str, listed: list[Any], where: str) -> Any:
    for value in listed:
        if str(value) == text:
            return value
    near = difflib.get_close_matches(text, [str(value) for value in listed], n=_SHOWN, cutoff=0.3)
    shown = near if len(listed) > _SHOWN else [str(value) for value in listed]
    more = f" and {len(listed) - len(shown)} more" if len(listed) > len(shown) else ""
    raise RunnerError(Exit.USAGE, f"{where} is '{text}': expected one of {', '.join(shown) or 'nothing listed'}{more}")


def _number(text: str, kind: str, options: dict[str, Any], where: str) -> int | float:
    try:
        value: int | float = int(text) if kind == "INT" else float(text)
    except ValueError:
        wanted = "a whole number" if kind == "INT" else "a number"
        raise RunnerError(Exit.USAGE, f"{where} is '{text}': expected {wanted}") from None
    low, high = options.get("min"), options.get("max")
    if (low is not None and value < low) or (high is not None and value > high) or value != value:
        raise RunnerError(Exit.USAGE, f"{where} is {text}: expected {low} to {high}")
    return value


def assign(prompt: Prompt, info: ObjectInfo, text: str) -> None:
    """Apply one --set."""
    node, name, value = split_assignment(text)
    node_id = find_node(prompt, node)
    class_type = prompt[node_id]["class_type"]
    spec = input_spec(info, class_type, name)
    if spec is None:
        names = ", ".join(input_names(info, class_type)) or "no inputs (the server does not know this node)"
        raise RunnerError(Exit.USAGE, f"--set '{text}': {describe(prompt, node_id)} has no input '{name}', but {names}")
    prompt[node_id]["inputs"][name] = parse_value(value, *spec, f"{name} of {describe(prompt, node_id)}")


def set_frames(prompt: Prompt, info: ObjectInfo, frames: int) -> None:
    """--frames: the length of every streaming sampler, else of every node that makes an empty video."""
    targets = [node_id for node_id, node in prompt.items() if node["class_type"] == SAMPLER]
    if not targets:
        targets = [
            node_id
            for node_id, node in prompt.items()
            if "video" in node["class_type"].casefold() and input_spec(info, node["class_type"], "length") is not None
        ]
    if not targets:
        raise RunnerError(
            Exit.USAGE,
            f"--frames: no {SAMPLER} and no empty-video node in this workflow; use --set node.input={frames}",
        )
    for node_id in targets:
        _set_number(prompt, info, node_id, "length", frames, "--frames")


def set_seed(prompt: Prompt, info: ObjectInfo, seed: int) -> None:
    """--seed: every whole-number input called seed or noise_seed."""
    found = False
    for node_id, node in prompt.items():
        for name in SEEDS:
            spec = input_spec(info, node["class_type"], name)
            if spec is not None and spec[0] == "INT":
                _set_number(prompt, info, node_id, name, seed, "--seed")
                found = True
    if not found:
        raise RunnerError(Exit.USAGE, "--seed: no node of this workflow has a seed")


def _set_number(prompt: Prompt, info: ObjectInfo, node_id: str, name: str, value: int, option: str) -> None:
    """Set the input, or the `value` of the number node it is connected to."""
    if is_link(prompt[node_id]["inputs"].get(name)):
        source = next(sources(prompt, node_id, name), None)
        if source is None or input_spec(info, prompt[source]["class_type"], "value") is None:
            raise RunnerError(
                Exit.USAGE, f"{option}: {name} of {describe(prompt, node_id)} comes from another node; use --set there"
            )
        node_id, name = source, "value"
    spec = input_spec(info, prompt[node_id]["class_type"], name)
    if spec is None:
        raise RunnerError(Exit.USAGE, f"{option}: {describe(prompt, node_id)} has no input '{name}' on this server")
    prompt[node_id]["inputs"][name] = parse_value(str(value), *spec, f"{option} for {describe(prompt, node_id)}")
