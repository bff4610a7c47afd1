"""The only package that imports the host (comfy, folder_paths, server, ...); it loads nothing of the host by itself."""

from __future__ import annotations

from importlib.util import find_spec


def host_present() -> bool:
    """True when the pack runs inside ComfyUI; False for tests and scripts that use the pure parts alone."""
    return find_spec("folder_paths") is not None and find_spec("comfy") is not None
