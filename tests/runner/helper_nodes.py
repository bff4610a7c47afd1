"""Nodes for the runner's tests, loaded by the real server: a slow one that can be interrupted, and one that fails."""

from __future__ import annotations

import json
import time
from typing import Any

import comfy.model_management
import comfy.utils
from server import PromptServer


class Slow:
    """Counts up, with progress and with the event our sampler sends."""

    CATEGORY, FUNCTION, RETURN_TYPES = "test", "run", ("IMAGE",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        widgets = {
            "image": ("IMAGE",),
            "steps": ("INT", {"default": 3, "min": 1, "max": 10000}),
            "seed": ("INT", {"default": 0, "min": 0, "max": 2**32, "control_after_generate": True}),
            "pause": ("FLOAT", {"default": 0.0, "min": 0.0, "max": 1.0}),
            "kind": (["quick", "slow"],),
            "loud": ("BOOLEAN", {"default": False}),
        }
        return {"required": widgets, "hidden": {"node": "UNIQUE_ID"}}

    def run(self, image: Any, steps: int, node: str, pause: float, **_: Any) -> tuple[Any]:
        bar = comfy.utils.ProgressBar(steps, node_id=node)
        for step in range(steps):
            time.sleep(pause)
            comfy.model_management.throw_exception_if_processing_interrupted()
            bar.update_absolute(step + 1, steps)
            data = {"node": node, "block": step + 1, "blocks": steps, "frames": 4 * step + 1, "total_frames": 4 * steps}
            PromptServer.instance.send_sync("fastar.block", data, PromptServer.instance.client_id)
        return (image,)


class Failing:
    """Raises, as a node does that cannot work with its input."""

    CATEGORY, FUNCTION, RETURN_TYPES = "test", "run", ("IMAGE",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"image": ("IMAGE",)}}

    def run(self, image: Any) -> tuple[Any]:
        raise ValueError(f"the picture is {image.shape[1]} high: expected 7, change the height")


class Report:
    """An output node that leaves a report as our sampler does."""

    CATEGORY, FUNCTION, RETURN_TYPES, OUTPUT_NODE = "test", "run", (), True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"image": ("IMAGE",)}}

    def run(self, image: Any) -> dict[str, Any]:
        return {"ui": {"fastar_report": [json.dumps({"frames": image.shape[0]})]}}


NODE_CLASS_MAPPINGS = {"TestSlow": Slow, "TestFailing": Failing, "TestReport": Report}
