"""FAST-AR Status: which kernels this machine can use, as text."""

from __future__ import annotations

from typing import Any

from ..fastar_core.kernel_report import status_table, summary, versions


class FastARStatus:
    NODE_ID = "FastARStatus"
    DISPLAY_NAME = "FAST-AR Status"
    CATEGORY = "FAST-AR/utils"
    DESCRIPTION = (
        "Says which kernel back-ends this machine can use and why it cannot use the others. Put its text into a bug report. "
        "The first run may take a minute: it compiles one small kernel."
    )
    FUNCTION = "status"
    OUTPUT_NODE = True
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("status",)
    OUTPUT_TOOLTIPS = ("Versions, device, and one paragraph per back-end with what its operations accept.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {}}

    @classmethod
    def IS_CHANGED(cls) -> float:
        """Drivers and environment may have changed since the last run."""
        return float("nan")

    def status(self) -> dict[str, Any]:
        """Return the text as output and as what the node shows."""
        from .host import versions as host

        device = host.compute_device()
        lines = [host.host_version(), versions(), f"device: {host.device_name(device)}", summary("auto", device), ""]
        text = "\n".join(lines) + status_table(device)
        return {"ui": {"text": [text]}, "result": (text,)}


NODE_CLASSES = [FastARStatus]
