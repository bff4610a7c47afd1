"""FAST-AR AnnSA: video self-attention that visits a part of the keys."""

from __future__ import annotations

import logging
from typing import Any

from ..fastar_core.annsa import AnnSASettings
from ..fastar_core.annsa.report_text import annsa_in_words, parse_layers
from .host.patch import with_attention_settings
from .host.preview import show_text

logger = logging.getLogger(__name__)


class FastARAnnSA:
    NODE_ID = "FastARAnnSA"
    DISPLAY_NAME = "FAST-AR AnnSA (sparse attention)"
    CATEGORY = "FAST-AR/attention"
    DESCRIPTION = (
        "Lets the self-attention of the less noisy steps visit only those groups of keys that promise the most attention. It pays with a "
        "long history or a long video; where it would not be faster, the call stays dense and the report says so."
    )
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)
    RETURN_NAMES = ("model",)
    OUTPUT_TOOLTIPS = ("The model with AnnSA attached, or the same model when AnnSA is off or cannot act on it.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs in the host's form."""
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "A video model: streaming Wan, Wan 2.1 / 2.2, LTX, HunyuanVideo, Mochi or CogVideoX."}),
                "density": (
                    "FLOAT",
                    {"default": 0.28, "min": 0.02, "max": 1.0, "step": 0.01, "tooltip": "Part of the query-key pairs that a sparse call "
                     "visits, those that are always visible included. Lower is faster and further from the full attention; 1 is off "
                     "and leaves the model alone."},
                ),
                "buckets": (
                    ["kmeans", "sign", "shared"],
                    {"default": "kmeans", "tooltip": "How keys are grouped. kmeans follows the keys and is by far the most faithful; sign "
                     "is a random hash; shared takes the groups of the text attention as the paper does (streaming only)."},
                ),
                "dense_share": (
                    "FLOAT",
                    {"default": 0.3, "min": 0.0, "max": 1.0, "step": 0.01, "tooltip": "The noisiest part of the steps that keeps the full "
                     "attention, found by noise level: 0.3 of 4 steps is the first one."},
                ),
                "dense_layers": (
                    "STRING",
                    {"default": "", "tooltip": "Layers that keep the full attention, for example 0, 3, 27-29. calibrate finds them."},
                ),
                "only_if_faster": (
                    "BOOLEAN",
                    {"default": True, "tooltip": "A call stays dense unless sparse is predicted to be ten percent faster. Switch it off to "
                     "judge the picture alone."},
                ),
                "calibrate": (
                    "BOOLEAN",
                    {"default": False, "tooltip": "Measures how much attention each layer would keep while everything is computed in full. "
                     "The report then names the layers for dense_layers."},
                ),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def patch(
        self, model: Any, density: float, buckets: Any, dense_share: float, dense_layers: str, only_if_faster: bool, calibrate: bool,
        unique_id: str | None = None,
    ) -> tuple[Any]:
        """The patched clone, or the model itself. Raises ConfigError for settings that cannot work."""
        layers = parse_layers(dense_layers)
        if density >= 1 and not calibrate:
            return (model,)
        settings = AnnSASettings(density, buckets, dense_share=dense_share, dense_layers=layers, only_if_faster=only_if_faster,
                                 calibrate=calibrate)

        def on_report(report: dict[str, Any]) -> None:
            show_text(unique_id, annsa_in_words(report))

        patched, reason = with_attention_settings(model, False, on_report, annsa=settings)
        if reason is not None:
            logger.warning("FAST-AR AnnSA: %s", reason)
            show_text(unique_id, reason)
        return (patched,)


NODE_CLASSES = [FastARAnnSA]
