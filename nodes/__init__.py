"""Collects the node classes of the pack.

The rule for every module listed in NODE_MODULES: it exports

    NODE_CLASSES: list[type]

and each class in it is a V1-style node (INPUT_TYPES, RETURN_TYPES, FUNCTION, CATEGORY = "FAST-AR/...") with two
further class attributes: NODE_ID (starts with "FastAR", never renamed later; the help page is
nodes/web/docs/<NODE_ID>.md) and DISPLAY_NAME (starts with "FAST-AR "). Every input carries a "tooltip". Host modules
(comfy, folder_paths, ...) are imported in nodes/host only; a node module gets them through there.

A module that cannot be imported costs only its own nodes: the reason is logged once and the rest of the pack loads.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

logger = logging.getLogger(__name__)

NODE_MODULES = ("load_model", "sampler", "tempcache", "prompts", "demo", "status", "annca", "annsa")


def collect_nodes(modules: tuple[str, ...] = NODE_MODULES) -> tuple[dict[str, type[Any]], dict[str, str]]:
    """Import `modules` of this package one by one; return ({node id: class}, {node id: display name})."""
    classes: dict[str, type[Any]] = {}
    names: dict[str, str] = {}
    for module in modules:
        try:
            listed = importlib.import_module(f".{module}", __name__).NODE_CLASSES
            entries = [(cls.NODE_ID, cls.DISPLAY_NAME, cls) for cls in listed]
        except Exception as reason:  # a broken optional part may raise anything; the others must still load
            logger.warning("FAST-AR: nodes of '%s' are not available: %s: %s", module, type(reason).__name__, reason)
            continue
        for node_id, display_name, cls in entries:
            if node_id in classes:
                logger.warning("FAST-AR: node id %s of '%s' is already taken; it is left out", node_id, module)
                continue
            classes[node_id] = cls
            names[node_id] = display_name
    return classes, names
