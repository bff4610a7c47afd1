"""Tells the host where the demo models that come with the pack lie."""

from __future__ import annotations

from pathlib import Path

import folder_paths

DEMO_CATEGORY = "fastar_demo"
DEMO_MODELS = Path(__file__).resolve().parents[2] / "example_workflows" / "models"


def register_demo_models() -> None:
    """List the demo files for the stock model loaders and for our own demo loaders.

    The folder goes behind the user's own folders, so that a file of the same name there still wins.
    """
    folder_paths.add_model_folder_path("diffusion_models", str(DEMO_MODELS))
    folder_paths.add_model_folder_path(DEMO_CATEGORY, str(DEMO_MODELS))
    folders, _ = folder_paths.folder_names_and_paths[DEMO_CATEGORY]
    folder_paths.folder_names_and_paths[DEMO_CATEGORY] = (folders, {".safetensors"})
