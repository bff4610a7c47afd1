"""Which host this is and on which device it computes."""

from __future__ import annotations

import platform
import sys

import comfy.model_management
import comfyui_version
import torch


def host_version() -> str:
    """ComfyUI, Python and the operating system, in one line."""
    python = ".".join(str(part) for part in sys.version_info[:3])
    return f"ComfyUI {comfyui_version.__version__}, Python {python}, {platform.system()} {platform.machine()}"


def compute_device() -> torch.device:
    """The device the host puts models on."""
    return comfy.model_management.get_torch_device()


def device_name(device: torch.device) -> str:
    """The GPU's name, or the kind of device where there is none."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
