"""FAST-AR AnnCA: text attention over fewer prompt rows, exactly for padding."""

from __future__ import annotations

import logging
from typing import Any

from ..fastar_core.annca import AnnCASettings
from .host.patch import with_attention_settings
from .host.preview import show_text

logger = logging.getLogger(__name__)
OFF, MERGE = "off", "merge padding"
MODES = (OFF, MERGE, "mass", "quant", "lsh")


def _rule_inputs() -> dict[str, Any]:
    """Inputs of the keep rules."""
    return {
        "bits": (
            "INT",
            {"default": 8, "min": 2, "max": 16, "tooltip": "Bits of the codes. More bits choose more carefully (mass, quant) or keep "
             "fewer tokens (lsh)."},
        ),
        "tables": (
            "INT",
            {"default": 4, "min": 1, "max": 16, "tooltip": "Hash tables of lsh. A token that matches in one of them is kept, so "
             "more tables keep more."},
        ),
        "probes": (
            "INT",
            {"default": 1, "min": 1, "max": 64, "tooltip": "quant: how many tokens each query may keep. lsh: how many neighbouring "
             "buckets count as shared. Higher keeps more and is closer to the full attention."},
        ),
        "min_kept": (
            "INT",
            {"default": 4, "min": 1, "max": 512, "tooltip": "A latent frame never keeps fewer tokens than this, beside the first "
             "one and the padding."},
        ),
        "start_percent": (
            "FLOAT",
            {"default": 0.3, "min": 0.0, "max": 1.0, "step": 0.01, "tooltip": "The keep rule begins at this share of the steps, "
             "found by noise level. The first steps decide on the layout and need the whole prompt."},
        ),
        "end_percent": (
            "FLOAT",
            {"default": 1.0, "min": 0.0, "max": 1.0, "step": 0.01, "tooltip": "The keep rule ends at this share of the steps."},
        ),
    }


class FastARAnnCA:
    NODE_ID = "FastARAnnCA"
    DISPLAY_NAME = "FAST-AR AnnCA (prompt rows)"
    CATEGORY = "FAST-AR/attention"
    DESCRIPTION = (
        "Computes the text attention over fewer prompt rows. Equal rows (the padding of a prompt) are merged without any change of the "
        "result; the keep rules drop tokens that a latent frame hardly looks at. It makes long prompts cheap; for ordinary ones the "
        "text attention is about one percent of the work, so do not expect speed."
    )
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL",)
    RETURN_NAMES = ("model",)
    OUTPUT_TOOLTIPS = ("The model with AnnCA attached, or the same model when AnnCA is off or cannot act on it.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Inputs in the host's form."""
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "A video model: streaming Wan, Wan 2.1 / 2.2 or LTX video."}),
                "mode": (
                    list(MODES),
                    {
                        "default": MERGE,
                        "tooltip": "merge padding changes nothing but the time. mass also drops the tokens that get least attention "
                        "from a latent frame (see coverage), quant those that are not among the best of any of its queries, lsh those "
                        "that share no hash bucket with one. off leaves the model alone.",
                    },
                ),
                **_rule_inputs(),
            },
            "optional": {
                "coverage": (
                    "FLOAT",
                    {"default": 0.95, "min": 0.05, "max": 1.0, "step": 0.01, "tooltip": "mass: how much of a latent frame's attention to "
                     "the words the kept ones must hold together. Higher keeps more words and stays closer to the full attention."},
                ),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def patch(
        self, model: Any, mode: str, bits: int, tables: int, probes: int, min_kept: int, start_percent: float, end_percent: float,
        coverage: float = 0.95, unique_id: str | None = None,
    ) -> tuple[Any]:
        """The patched clone, or the model itself. Raises ConfigError for settings that cannot work."""
        if mode == OFF:
            return (model,)
        keep: Any = "all" if mode == MERGE else mode
        settings = AnnCASettings(keep, bits, tables, probes, coverage=coverage, min_kept=min_kept, start=start_percent, end=end_percent)
        patched, reason = with_attention_settings(model, True, annca=settings)
        if reason is not None:
            logger.warning("FAST-AR AnnCA: %s", reason)
            show_text(unique_id, reason)
        return (patched,)


NODE_CLASSES = [FastARAnnCA]
