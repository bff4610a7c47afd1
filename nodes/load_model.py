"""The loader node: a weight file of any published style becomes a MODEL that knows how its family is sampled."""

from __future__ import annotations

import logging
from typing import Any

from ..fastar_core.presets import AUTO, get_preset, preset_keys
from .host.load_model import NO_LORA, WEIGHT_DTYPES, load_streaming_model, lora_files, model_files
from .host.preview import show_text

logger = logging.getLogger(__name__)


def _preset_tooltip() -> str:
    rows = "; ".join(f"{key} = {get_preset(key).label}" for key in preset_keys())
    return (
        "The family of the model, which cannot be told from its weights. auto takes the hint in the file's name or "
        f"metadata and asks you to choose when there is none. A wrong choice gives plausible but worse video. {rows}."
    )


class FastARLoadModel:
    """Loads a causal (streaming) video model of the Wan layout."""

    NODE_ID = "FastARLoadModel"
    DISPLAY_NAME = "FAST-AR Load Streaming Model"
    CATEGORY = "FAST-AR/loaders"
    DESCRIPTION = (
        "Loads a streaming video model (Self-Forcing, Causal-Forcing, ...) from a .safetensors or .pt file in the "
        "authors' own layout, and says in the report what was found, what was left out, and how the family is sampled."
    )
    FUNCTION = "load"
    RETURN_TYPES = ("MODEL", "STRING")
    RETURN_NAMES = ("model", "report")
    OUTPUT_TOOLTIPS = ("The model with its preset attached.", "What was found and ignored, the preset, and warnings.")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs in the host's form; the file lists are read anew each time."""
        return {
            "required": {
                "model_name": (model_files(), {"tooltip": "Weight file in models/diffusion_models (or models/unet)."}),
                "preset": ([AUTO, *preset_keys()], {"default": AUTO, "tooltip": _preset_tooltip()}),
                "weight_dtype": (
                    list(WEIGHT_DTYPES),
                    {"default": "default", "tooltip": "How weights are kept: fp8 is half of bf16 and coarser."},
                ),
            },
            "optional": {
                "lora": (
                    lora_files(),
                    {"default": NO_LORA, "tooltip": "LoRA file in models/loras, merged into the weights at loading."},
                ),
                "lora_strength": (
                    "FLOAT",
                    {
                        "default": 1.0, "min": -10.0, "max": 10.0, "step": 0.01,
                        "tooltip": "1 = as the authors trained it; lower is weaker; 0 leaves the LoRA out.",
                    },
                ),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }  # fmt: skip

    def load(
        self, model_name: str, preset: str, weight_dtype: str, lora: str = NO_LORA, lora_strength: float = 1.0,
        unique_id: str | None = None,
    ) -> tuple[Any, str]:  # fmt: skip
        """MODEL and report text. Raises CheckpointError or ConfigError with what to change."""
        model, report = load_streaming_model(model_name, preset, weight_dtype, lora, lora_strength)
        show_text(unique_id, report)
        logger.info("FAST-AR Load Streaming Model\n%s", report)
        return model, report


NODE_CLASSES = [FastARLoadModel]
