"""Nodes of a host in this process, described as the server's /object_info does (the parts that workflows need)."""

from __future__ import annotations

import importlib
import json
from typing import Any

from tests_support import Host

HOST_MODULES = ("nodes", "comfy_extras.nodes_preview_any")


def host_classes(host: Host) -> dict[str, type]:
    """Our node classes and those of HOST_MODULES by id."""
    classes: dict[str, type] = {}
    for module in HOST_MODULES:
        classes |= importlib.import_module(module).NODE_CLASS_MAPPINGS
    return {**classes, **host.nodes}


def describe(host: Host) -> dict[str, Any]:
    """/object_info of `host_classes`, after a round trip through JSON."""
    names = {node_id: str(getattr(cls, "DISPLAY_NAME", node_id)) for node_id, cls in host.nodes.items()}
    for module in HOST_MODULES:
        names = {**importlib.import_module(module).NODE_DISPLAY_NAME_MAPPINGS, **names}
    info = {node_id: _entry(node_id, cls, names) for node_id, cls in host_classes(host).items()}
    return dict(json.loads(json.dumps(info)))


def _entry(node_id: str, cls: Any, names: dict[str, str]) -> dict[str, Any]:
    declared = cls.INPUT_TYPES()
    return {
        "input": declared,
        "input_order": {group: list(entries) for group, entries in declared.items()},
        "output": cls.RETURN_TYPES,
        "output_name": getattr(cls, "RETURN_NAMES", cls.RETURN_TYPES),
        "display_name": names.get(node_id, node_id),
    }
