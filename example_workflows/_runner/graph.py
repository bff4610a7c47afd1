"""A workflow in API form: {node id: {class_type, inputs, _meta}}; finding it, loading it, finding nodes in it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import Exit, RunnerError
from .paths import WORKFLOWS

DEFAULT = "demo_text_to_video"
Node = dict[str, Any]
Prompt = dict[str, Node]


@dataclass(frozen=True)
class Workflow:
    """A file that was read: exactly one of `prompt` (API form) and `ui` (UI form) is set."""

    name: str
    path: Path
    prompt: Prompt | None
    ui: dict[str, Any] | None


def known_workflows(folder: Path = WORKFLOWS) -> dict[str, list[Path]]:
    """Name -> its files, API form first."""
    found: dict[str, list[Path]] = {}
    for path in [*sorted((folder / "api").glob("*.json")), *sorted(folder.glob("*.json"))]:
        found.setdefault(path.stem, []).append(path)
    return found


def find_workflow(text: str, folder: Path = WORKFLOWS) -> Path:
    """The file for a path or a name from --list."""
    path = Path(text).expanduser()
    if path.is_file():
        return path
    known = known_workflows(folder)
    name = path.name.removesuffix(".json")
    if name in known and len(path.parts) == 1:
        return known[name][0]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    raise RunnerError(
        Exit.USAGE,
        f"no workflow '{text}': expected a file or one of {', '.join(known) or '(none there)'}.{hint}",
    )


def load_workflow(path: Path) -> Workflow:
    """Read a workflow file in either form; raises RunnerError(USAGE) when it is neither."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        raise RunnerError(Exit.USAGE, f"{path} cannot be read as a workflow: {reason}") from reason
    if isinstance(data, dict):
        if isinstance(data.get("nodes"), list) and "links" in data:
            return Workflow(path.stem, path, None, data)
        data = data.get("prompt", data) if "class_type" not in data else data
        nodes = data.values() if isinstance(data, dict) else []
        if nodes and all(isinstance(node, dict) and "class_type" in node for node in nodes):
            for node in nodes:
                node.setdefault("inputs", {})
            return Workflow(path.stem, path, data, None)
    raise RunnerError(
        Exit.USAGE,
        f"{path} is no ComfyUI workflow: expected the UI form ('nodes' and 'links') or the API form (node ids with "
        "'class_type' and 'inputs').",
    )


def title_of(node: Node) -> str:
    """The title the author gave the node, else its class."""
    return str(node.get("_meta", {}).get("title") or node["class_type"])


def describe(prompt: Prompt, node_id: str, class_type: str | None = None) -> str:
    """How messages name a node: 'Sampler' (node 5, FastARStreamingSampler)."""
    node = prompt.get(node_id)
    if node is None:
        return f"node {node_id}" + (f" ({class_type})" if class_type else "")
    return f"'{title_of(node)}' (node {node_id}, {node['class_type']})"


def find_node(prompt: Prompt, key: str) -> str:
    """The id of the node that `key` names by id, class or title; raises RunnerError(USAGE) unless there is one."""
    if key in prompt:
        return key
    for fold in (str, str.casefold):
        for name in (lambda node: str(node["class_type"]), title_of):
            found = [node_id for node_id, node in prompt.items() if fold(name(node)) == fold(key)]
            if len(found) == 1:
                return found[0]
            if found:
                listed = ", ".join(describe(prompt, node_id) for node_id in found)
                raise RunnerError(Exit.USAGE, f"'{key}' names {len(found)} nodes: {listed}. Use the number of one.")
    listed = ", ".join(describe(prompt, node_id) for node_id in prompt)
    raise RunnerError(Exit.USAGE, f"no node '{key}' in this workflow: expected the number, class or title of {listed}.")


def sources(prompt: Prompt, node_id: str, name: str) -> Iterator[str]:
    """The id of the node that input `name` is connected to, if it is."""
    value = prompt[node_id]["inputs"].get(name)
    if is_link(value) and value[0] in prompt:
        yield value[0]


def is_link(value: Any) -> bool:
    """True for [node id, output number]."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int)
