"""A workflow being drawn: nodes in columns, each column a titled group; saved in the UI form and in the API form.

Sizes are in the canvas units of the web interface, where a node's title lies above its box.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

TITLE, SLOT, WIDGET, PADDING = 30, 20, 24, 20
GROUP_TITLE, COLUMN_GAP, NODE_GAP = 50, 60, 24
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
SEEDS = ("seed", "noise_seed")
NOTE = "MarkdownNote"
NAMESPACE = uuid.UUID("6f6f1c0e-6a51-4f0a-9d8b-2b8f3a3c7a11")
Info = dict[str, Any]


@dataclass
class Node:
    """`values` by input name; `links`: input name -> (node, output name). `room`: height beyond slots and widgets."""

    number: int
    kind: str
    title: str
    values: dict[str, Any]
    links: dict[str, tuple[Node, str]]
    width: int
    room: int
    x: int = 0
    y: int = 0
    height: int = 0


@dataclass
class Column:
    """Nodes below each other; without a title they are not framed."""

    title: str
    colour: str
    nodes: list[Node] = field(default_factory=list)


def is_widget(kind: Any, options: dict[str, Any]) -> bool:
    """Whether the web interface shows an input as something to type in or choose."""
    return (isinstance(kind, list) or kind in WIDGETS) and not options.get("forceInput")


class Graph:
    """`info`: the nodes as /object_info describes them."""

    def __init__(self, name: str, info: Info) -> None:
        self.name, self.info = name, info
        self.columns: list[Column] = []
        self._count = 0

    def column(self, title: str = "", colour: str = "#3f5159") -> None:
        """Start the next column to the right."""
        self.columns.append(Column(title, colour))

    def note(self, text: str, width: int = 380, height: int = 400, title: str = "About") -> None:
        """A Markdown note, which does not run."""
        self._add(NOTE, title, {"text": text}, {}, width, height - SLOT)

    def node(
        self, kind: str, width: int = 340, room: int = 0, title: str = "", /, **inputs: Any
    ) -> Node:
        """Add a node; an input is a value or (node, output name). Inputs that are left out keep their default."""
        names = [name for name, _, _ in self.inputs(kind)]
        unknown = [name for name in inputs if name not in names]
        if unknown:
            raise KeyError(f"{self.name}: {kind} has no input {', '.join(unknown)}; it has {', '.join(names)}")
        links = {name: value for name, value in inputs.items() if isinstance(value, tuple)}
        values = {name: value for name, value in inputs.items() if name not in links}
        for name, kind_of_input, options in self.inputs(kind):
            if is_widget(kind_of_input, options) and name not in inputs:
                values[name] = options["default"] if "default" in options else _first(kind_of_input, options)
        return self._add(kind, title or self.info[kind]["display_name"], values, links, width, room)

    def inputs(self, kind: str) -> list[tuple[str, Any, dict[str, Any]]]:
        """(name, type, options) of every input of a class in the server's order."""
        declared, order = self.info[kind]["input"], self.info[kind]["input_order"]
        entries = [(name, declared[group][name]) for group in ("required", "optional") for name in order.get(group, [])]
        return [(name, entry[0], entry[1] if len(entry) > 1 else {}) for name, entry in entries]

    def _add(
        self, kind: str, title: str, values: dict[str, Any], links: dict[str, tuple[Node, str]], width: int, room: int
    ) -> Node:
        self._count += 1
        node = Node(self._count, kind, title, values, links, width, room)
        self.columns[-1].nodes.append(node)
        return node

    # -- saved forms --------------------------------------------------------------------------------------------------

    def api(self) -> dict[str, Any]:
        """The API form."""
        return {
            str(node.number): {
                "class_type": node.kind,
                "inputs": {**node.values, **{name: self._source(link) for name, link in node.links.items()}},
                "_meta": {"title": node.title},
            }
            for node in self._nodes()
            if node.kind != NOTE
        }

    def _source(self, link: tuple[Node, str]) -> list[Any]:
        return [str(link[0].number), self.info[link[0].kind]["output_name"].index(link[1])]

    def ui(self) -> dict[str, Any]:
        """The UI form, as the web interface saves it."""
        groups = self._place()
        nodes = {node.number: self._ui_node(node, order) for order, node in enumerate(self._nodes())}
        links: list[list[Any]] = []
        for node in self._nodes():
            for slot, entry in enumerate(nodes[node.number]["inputs"]):
                if entry["name"] not in node.links:
                    continue
                source, output = node.links[entry["name"]]
                place = self._source((source, output))[1]
                kind = nodes[source.number]["outputs"][place]["type"]
                links.append([len(links) + 1, source.number, place, node.number, slot, kind])
                entry["link"] = len(links)
                nodes[source.number]["outputs"][place]["links"].append(len(links))
        return {
            "id": str(uuid.uuid5(NAMESPACE, self.name)),
            "revision": 0,
            "last_node_id": self._count,
            "last_link_id": len(links),
            "nodes": list(nodes.values()),
            "links": links,
            "groups": groups,
            "config": {},
            "extra": {"ds": {"scale": 0.6, "offset": [40, 80]}},
            "version": 0.4,
        }

    def _nodes(self) -> list[Node]:
        return [node for column in self.columns for node in column.nodes]

    def _place(self) -> list[dict[str, Any]]:
        """Give every node its place and size; returns the frames."""
        groups, x = [], 0
        for column in self.columns:
            y, width = GROUP_TITLE, max(node.width for node in column.nodes)
            for node in column.nodes:
                node.height = self._height(node)
                node.x, node.y, node.width = x + PADDING, y + TITLE, width
                y += TITLE + node.height + NODE_GAP
            size = [x, 0, width + 2 * PADDING, y - NODE_GAP + PADDING]
            if column.title:
                groups.append({
                    "id": len(groups) + 1, "title": column.title, "bounding": size, "color": column.colour,
                    "font_size": 24, "flags": {},
                })  # fmt: skip
            x += size[2] + COLUMN_GAP
        return groups

    def _height(self, node: Node) -> int:
        if node.kind == NOTE:
            return node.room + SLOT
        inputs = self.inputs(node.kind)
        widgets = [name for name, kind, options in inputs if is_widget(kind, options)]
        slots = max(len(inputs) - len(widgets), len(self.info[node.kind]["output"]))
        controls = sum(1 for name, kind, options in inputs if _has_control(name, kind, options))
        return slots * SLOT + (len(widgets) + controls) * WIDGET + 22 + node.room

    def _ui_node(self, node: Node, order: int) -> dict[str, Any]:
        inputs = [] if node.kind == NOTE else self.inputs(node.kind)
        sockets = [{"name": n, "type": k, "link": None} for n, k, options in inputs if not is_widget(k, options)]
        optional = self.info[node.kind]["input_order"].get("optional", []) if inputs else []
        for entry in sockets:
            if entry["name"] in optional:
                entry["shape"] = 7
        widgets = [
            {"name": n, "type": "COMBO" if isinstance(k, list) else k, "widget": {"name": n}, "link": None}
            for n, k, options in inputs if is_widget(k, options)
        ]  # fmt: skip
        outputs = [] if node.kind == NOTE else zip(self.info[node.kind]["output_name"], self.info[node.kind]["output"])
        return {
            "id": node.number,
            "type": node.kind,
            "pos": [node.x, node.y],
            "size": [node.width, node.height],
            "flags": {},
            "order": order,
            "mode": 0,
            "inputs": [*sockets, *widgets],
            "outputs": [{"name": name, "type": kind, "links": []} for name, kind in outputs],
            "title": node.title,
            "properties": {} if node.kind == NOTE else {"Node name for S&R": node.kind},
            "widgets_values": self._widget_values(node, inputs),
        }

    @staticmethod
    def _widget_values(node: Node, inputs: list[tuple[str, Any, dict[str, Any]]]) -> list[Any]:
        if node.kind == NOTE:
            return [node.values["text"]]
        values = []
        for name, kind, options in inputs:
            if is_widget(kind, options):
                values.append(node.values[name])
                values += ["fixed"] if _has_control(name, kind, options) else []
        return values


def _has_control(name: str, kind: Any, options: dict[str, Any]) -> bool:
    return kind == "INT" and bool(options.get("control_after_generate", name in SEEDS))


def _first(kind: Any, options: dict[str, Any]) -> Any:
    listed = kind if isinstance(kind, list) else options.get("options", [""])
    return listed[0] if listed else ""
