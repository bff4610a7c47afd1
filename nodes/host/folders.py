"""Tells the host where the demo models that come with the pack lie, and finds them for our own demo loaders.

example_workflows/models/ has one folder per category, so that each loader lists only what it can load:
diffusion_models/ for the stock loaders, fastar_demo/ (codec, text encoder, slate) for the nodes in nodes/demo.py.
"""

from __future__ import annotations

from pathlib import Path

import folder_paths

DEMO_CATEGORY = "fastar_demo"
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
