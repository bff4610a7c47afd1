"""FAST-AR for ComfyUI: streaming video models with a long memory. The folder may have any name."""

from __future__ import annotations

import logging
from typing import Any

from .nodes import collect_nodes
from .nodes.host import host_present

NODE_CLASS_MAPPINGS: dict[str, type[Any]] = {}
NODE_DISPLAY_NAME_MAPPINGS: dict[str, str] = {}
WEB_DIRECTORY = "./nodes/web"

if host_present():
    try:
        from .nodes.host.folders import register_demo_models

        register_demo_models()
    except Exception as reason:  # without the demo models the pack is still of use
        logging.getLogger(__name__).warning(
            "FAST-AR: the demo models are not listed: %s: %s", type(reason).__name__, reason
        )
    NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS = collect_nodes()

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]
