"""A UI-form workflow as one flat set of nodes; links are followed through reroutes, bypassed nodes and subgraphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .errors import Exit, RunnerError

MUTED, BYPASSED = 2, 4
NOTES = ("Note", "MarkdownNote")
REROUTE, PRIMITIVE = "Reroute", "PrimitiveNode"
_SUBGRAPH_INPUT = "-10"
_SUBGRAPH_OUTPUT = "-20"
_MAX_DEPTH = 200


@dataclass(frozen=True)
class Link:
    """An output of a node that runs."""

    node: str
    slot: int


@dataclass(frozen=True)
class Value:
    """A value typed into a primitive node or into a widget of a subgraph."""

    value: Any


Source = Link | Value | None


@dataclass
class Scope:
    """One graph: the workflow itself or one instance of a subgraph. links: id -> (origin node, output number)."""

    nodes: dict[str, UiNode] = field(default_factory=dict)
    links: dict[int, tuple[str, int]] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)  # output number of the subgraph -> link id inside
    instance: UiNode | None = None
    inputs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class UiNode:
    """A node of the file; `id` is unique in the whole workflow ('7:3' = node 3 inside the subgraph node 7)."""

    id: str
    raw: dict[str, Any]
    scope: Scope
    inner: Scope | None = None

    @property
    def type(self) -> str:
        return str(self.raw.get("type"))

    @property
    def mode(self) -> int:
        return int(self.raw.get("mode") or 0)

    @property
    def inputs(self) -> list[dict[str, Any]]:
        return [entry for entry in self.raw.get("inputs") or [] if isinstance(entry, dict)]

    @property
    def runs(self) -> bool:
        """Whether this node itself is sent to the server."""
        virtual = self.inner is not None or self.type in (*NOTES, REROUTE, PRIMITIVE)
        return not virtual and self.mode not in (MUTED, BYPASSED)


def read_graph(ui: dict[str, Any]) -> Scope:
    """Build the scopes of a UI-form workflow, subgraphs included."""
    defined = {entry["id"]: entry for entry in (ui.get("definitions") or {}).get("subgraphs") or []}
    return _scope(ui, defined, "", None)


def _scope(graph: dict[str, Any], defined: dict[str, Any], prefix: str, instance: UiNode | None) -> Scope:
    if prefix.count(":") > _MAX_DEPTH:
        raise RunnerError(Exit.USAGE, "a subgraph of this workflow holds itself")
    scope = Scope(instance=instance, inputs=graph.get("inputs") or [])
    for link in graph.get("links") or []:
        if isinstance(link, dict):
            number, origin, slot = link["id"], link["origin_id"], link["origin_slot"]
            target, end = link["target_id"], link["target_slot"]
        elif link:
            number, origin, slot, target, end = link[:5]
        else:
            continue
        scope.links[int(number)] = (str(origin), int(slot))
        if str(target) == _SUBGRAPH_OUTPUT:
            scope.ends[int(end)] = int(number)
    for raw in graph["nodes"]:
        node = UiNode(prefix + str(raw["id"]), raw, scope)
        scope.nodes[str(raw["id"])] = node
        if raw.get("type") in defined:
            node.inner = _scope(defined[raw["type"]], defined, node.id + ":", node)
    return scope


def running_nodes(scope: Scope) -> Iterator[UiNode]:
    """All nodes that are sent to the server."""
    for node in scope.nodes.values():
        if node.inner is not None and node.mode not in (MUTED, BYPASSED):
            yield from running_nodes(node.inner)
        elif node.runs:
            yield node


def input_source(node: UiNode, index: int, depth: int = 0) -> Source:
    """What feeds input number `index` of a node; None when nothing that runs does."""
    entry = node.inputs[index] if index < len(node.inputs) else {}
    link = entry.get("link")
    if link is not None:
        return _link_source(node.scope, int(link), depth + 1)
    return _typed_into_subgraph(node, entry) if node.inner is not None else None


def _typed_into_subgraph(node: UiNode, entry: dict[str, Any]) -> Source:
    """The value of a widget that a subgraph shows for a node inside; None leaves the inner node's own value."""
    shown = [other for other in node.inputs if other.get("widget")]
    values = node.raw.get("widgets_values")
    if entry.get("widget") and isinstance(values, list) and len(values) == len(shown):
        return Value(values[shown.index(entry)])
    return None


def _link_source(scope: Scope, number: int, depth: int) -> Source:
    if depth > _MAX_DEPTH:
        raise RunnerError(Exit.USAGE, "the connections of this workflow run in a circle")
    if number not in scope.links:
        return None
    origin, slot = scope.links[number]
    if origin == _SUBGRAPH_INPUT and scope.instance is not None:
        name = scope.inputs[slot].get("name") if slot < len(scope.inputs) else None
        names = [entry.get("name") for entry in scope.instance.inputs]
        return input_source(scope.instance, names.index(name), depth) if name in names else None
    node = scope.nodes.get(origin)
    return None if node is None else _output_source(node, slot, depth)


def _output_source(node: UiNode, slot: int, depth: int) -> Source:
    if node.mode == MUTED:
        return None
    if node.mode == BYPASSED:
        index = _passed_through(node, slot)
        return None if index is None else input_source(node, index, depth)
    if node.type == REROUTE:
        return input_source(node, 0, depth)
    if node.type == PRIMITIVE:
        values = node.raw.get("widgets_values") or []
        return Value(values[0]) if values else None
    if node.inner is not None:
        end = node.inner.ends.get(slot)
        return None if end is None else _link_source(node.inner, end, depth + 1)
    return Link(node.id, slot)


def _passed_through(node: UiNode, slot: int) -> int | None:
    """The input that stands in for an output of a bypassed node: the same place if its type fits, else the first."""
    outputs = node.raw.get("outputs") or []
    wanted = outputs[slot].get("type") if slot < len(outputs) else None
    kinds = [entry.get("type") for entry in node.inputs]
    if slot < len(kinds) and (kinds[slot] == wanted or "*" in (kinds[slot], wanted)):
        return slot
    if wanted in kinds:
        return kinds.index(wanted)
    return kinds.index("*") if "*" in kinds else None
