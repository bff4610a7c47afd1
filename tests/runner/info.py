"""A small stand-in for the server's /object_info."""

from __future__ import annotations

from typing import Any


def node(required: dict[str, Any], optional: dict[str, Any] | None = None, name: str = "") -> dict[str, Any]:
    optional = optional or {}
    return {
        "input": {"required": required, "optional": optional},
        "input_order": {"required": list(required), "optional": list(optional)},
        "display_name": name,
    }


INFO = {
    "Loader": node(
        {"file": (["a.safetensors", "b.safetensors"], {}), "dtype": ("COMBO", {"options": ["default", "fp8"]})}
    ),
    "Encode": node({"text": ("STRING", {"multiline": True}), "clip": ("CLIP",)}, name="Encode Text"),
    "FastARStreamingSampler": node(
        {
            "model": ("MODEL",),
            "positive": ("CONDITIONING",),
            "width": ("INT", {"default": 832, "min": 16, "max": 4096}),
            "length": ("INT", {"default": 81, "min": 1, "max": 100000}),
            "seed": ("INT", {"default": 0, "min": 0, "max": 2**64 - 1, "control_after_generate": True}),
            "cfg": ("FLOAT", {"default": 1.0, "min": 0.0, "max": 30.0}),
            "to_file": ("BOOLEAN", {"default": False}),
        },
        {
            "negative": ("CONDITIONING",),
            "note": ("STRING", {"default": "none"}),
            "forced": ("INT", {"forceInput": True}),
        },
    ),
    "KSampler": node({"model": ("MODEL",), "seed": ("INT", {"default": 0}), "steps": ("INT", {"default": 20})}),
    "EmptyVideo": node({"length": ("INT", {"default": 81, "min": 1, "max": 1000}), "size": ("INT", {"default": 8})}),
    "PrimitiveInt": node({"value": ("INT", {"default": 0})}),
    "LoadImage": node({"image": (["in.png", "other.png"], {"image_upload": True})}),
    "Scale": node({"image": ("IMAGE",), "by": ("FLOAT", {"default": 2.0})}),
    "Points": node({"points": ("POINTS", {}), "count": ("INT", {"default": 1})}),
    "Save": node({"image": ("IMAGE",), "prefix": ("STRING", {"default": "x"})}),
}
