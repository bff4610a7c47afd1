"""Tells the host where the demo models that come with the pack lie, and finds them for our own demo loaders.

example_workflows/models/ has one folder per category, so that each loader lists only what it can load:
diffusion_models/ for the stock loaders, fastar_demo/ (codec, text encoder, slate) for the nodes in nodes/demo.py;
pictures/ holds start pictures, which no other node lists.
"""

from __future__ import annotations

from pathlib import Path

import folder_paths
import numpy as np
import torch
from PIL import Image

DEMO_CATEGORY = "fastar_demo"
PICTURES = "pictures"
DEMO_MODELS = Path(__file__).resolve().parents[2] / "example_workflows" / "models"


def register_demo_models() -> None:
    """List the demo files behind the user's own folders, so that a file of the same name there still wins."""
    for category in ("diffusion_models", DEMO_CATEGORY):
        folder_paths.add_model_folder_path(category, str(DEMO_MODELS / category))
    folders, _ = folder_paths.folder_names_and_paths[DEMO_CATEGORY]
    folder_paths.folder_names_and_paths[DEMO_CATEGORY] = (folders, {".safetensors"})


def demo_files(kind: str) -> list[str]:
    """Names of all demo parts, those with `kind` in their name first: the first one is the default of a node."""
    return sorted(folder_paths.get_filename_list(DEMO_CATEGORY), key=lambda name: (kind not in name.lower(), name))


def demo_path(name: str) -> str:
    """Full path of a demo part. Raises FileNotFoundError when it is gone."""
    return str(folder_paths.get_full_path_or_raise(DEMO_CATEGORY, name))


def demo_pictures() -> list[str]:
    """Names of the start pictures that come with the pack."""
    return sorted(path.name for path in (DEMO_MODELS / PICTURES).glob("*.png"))


def load_demo_picture(name: str) -> torch.Tensor:
    """A start picture as IMAGE [1, height, width, 3] in 0..1; raises FileNotFoundError for a name not listed."""
    if name not in demo_pictures():
        raise FileNotFoundError(f"the pack has no start picture '{name}'; choose one of {', '.join(demo_pictures())}")
    with Image.open(DEMO_MODELS / PICTURES / name) as picture:
        pixels = np.asarray(picture.convert("RGB"), dtype=np.float32)
    return torch.from_numpy(pixels / 255)[None]
