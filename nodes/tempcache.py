"""The TempCache node: a MODEL whose cache merges what repeats, for our samplers and the host's own AR sampler."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from ..fastar_core.tempcache.fitting import choose_settings
from ..fastar_core.tempcache.plan import OFF, PRESETS
from ..fastar_core.tempcache.settings import AUTO_MEMORY, FAMILY_CONTEXT, FAMILY_SINK, FAMILY_SPAN
from .host.preview import show_text
from .host.tempcache import with_tempcache

logger = logging.getLogger(__name__)

AS_PRESET = "preset"
_HELP = {
    "model": "A streaming video model. LoRA and patch nodes may stand before or after this node.",
    "preset": "How much is remembered. 'quality' keeps the most and is the slowest, 'small' keeps the least and is the fastest, "
              "'balanced' is between them. 'off' passes the model on as it is.",
    "budget": "Size of the cache in latent frames (4 frames of video each), with the first and the most recent frames counted in. A "
              "higher number remembers more and looks better; a lower one is faster and needs less memory. 0 takes the preset's.",
    "memory_gb": "Most memory the cache may take, in gigabytes: the budget is lowered until it fits. 0 sets no limit, -1 takes what "
                 "is free when the run starts. A lower limit saves memory, is faster, and forgets more.",
    "sink": "Latent frames at the beginning that stay as they are and are never merged. More of them hold the look of the start "
            "better and leave less room for the rest. -1 takes the number of the model's family, but at least 1.",
    "recent": "The most recent latent frames that stay as they are before they are merged. More of them keep motion sharper and leave "
              "less room for the past; 0 merges at once, as the paper does. -1 takes the preset's.",
    "threshold": "How similar a piece of picture must be to an older one to be merged with it while there is room (1 = equal). Higher "
                 "loses less and fills the cache sooner; lower merges more. 1.01 never merges, and what is used least is dropped. 0 "
                 "takes the preset's. The speed is the same.",
    "reindex": "'on' keeps old frames within the time span the model was trained on, however long the video is: better for videos "
               "many times longer than that, and hardly slower. 'off' keeps true distances, better for shorter ones.",
    "history": "How merged rows are stored. 'full' is exact and the fastest; 'int8' takes about half the memory and is slower, with "
               "hardly any loss.",
    "restarts": "Only for families whose timeline starts over (Krea, CausVid). 'forget' drops the history at every restart, as their "
                "authors do; 'keep' carries the merged history over, which remembers the whole video and is slower.",
    "similarity": "What similar means: 'paper' compares the direction of keys and is the fastest; 'logit' compares their effect on "
                  "attention and is slower to match.",
    "space": "Where keys are compared and averaged: 'post' where they stand, after rotary positions, which remembers much better; "
             "'pre' before them, as the paper seems to do, which takes more memory and is slower.",
    "representative": "Which key speaks for merged ones: 'mean' remembers best, 'last' is the paper's choice and the fastest, "
                      "'medoid' is the slowest.",
    "search": "How matches are found: 'int8' compares 8-bit codes and is the fastest on the CPU, and what it finds is then compared "
              "exactly; 'exact' compares everything and finds hardly better; 'lsh' misses matches.",
    "correction": "How far the measured weight of a merged row may exceed the number of pieces it stands for, as a logarithm. Merging "
                  "takes a little attention from the past; this gives it back, at no cost in time. 0 switches it off, more than 0.5 "
                  "overdoes it. -1 takes the preset's.",
}
_ADVANCED = {
    "similarity": ("paper", "logit"),
    "space": ("post", "pre"),
    "representative": ("mean", "last", "medoid"),
    "search": ("int8", "exact", "lsh"),
}


def _input(name: str, kind: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    return kind, {**options, "tooltip": _HELP[name]}


class FastARTempCache:
    NODE_ID = "FastARTempCache"
    DISPLAY_NAME = "FAST-AR TempCache"
    CATEGORY = "FAST-AR"
    DESCRIPTION = ("Gives a streaming video model a memory of the whole video at the cost of a short one: what repeats over time is "
                   "merged in the cache, so memory and speed stay the same however long the video gets.")
    FUNCTION = "patch"
    RETURN_TYPES = ("MODEL", "STRING")
    RETURN_NAMES = ("model", "plan")
    OUTPUT_TOOLTIPS = ("The model with this cache; samplers use it with cache 'preset'.", "What the cache will hold, in words.")

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        advanced = {name: _input(name, [AS_PRESET, *kinds], default=AS_PRESET, advanced=True) for name, kinds in _ADVANCED.items()}
        return {
            "required": {
                "model": _input("model", "MODEL"),
                "preset": _input("preset", [OFF, *PRESETS], default="balanced"),
                "budget": _input("budget", "INT", default=0, min=0, max=100000),
                "memory_gb": _input("memory_gb", "FLOAT", default=0.0, min=float(AUTO_MEMORY), max=10000.0, step=0.1, round=0.01),
            },
            "optional": {
                "sink": _input("sink", "INT", default=FAMILY_SINK, min=FAMILY_SINK, max=1000, advanced=True),
                "recent": _input("recent", "INT", default=-1, min=-1, max=1000, advanced=True),
                "threshold": _input("threshold", "FLOAT", default=0.0, min=0.0, max=1.01, step=0.01, round=0.001, advanced=True),
                "reindex": _input("reindex", ["off", "on"], default="off", advanced=True),
                "history": _input("history", ["full", "int8"], default="full", advanced=True),
                "restarts": _input("restarts", ["forget", "keep"], default="forget", advanced=True),
                **advanced,
                "correction": _input("correction", "FLOAT", default=-1.0, min=-1.0, max=5.0, step=0.05, round=0.001, advanced=True),
            },
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def patch(self, model: Any, preset: str, budget: int, memory_gb: float, sink: int = FAMILY_SINK, recent: int = -1,
              threshold: float = 0.0, reindex: str = "off", history: str = "full", restarts: str = "forget",
              correction: float = -1.0, unique_id: str | None = None, **advanced: str) -> tuple[Any, str]:
        """MODEL and plan. Raises ConfigError for values that hold no history, UnsupportedError for other kinds of models."""
        if preset == OFF:
            return model, "TempCache is off: the cache rule of the sampler node holds."
        base = PRESETS[preset]
        chosen: dict[str, object] = {name: value for name, value in advanced.items() if value != AS_PRESET}
        if history == "int8":
            chosen["history_type"] = history
        if correction >= 0:
            chosen["bias_correction"] = correction
        changes: dict[str, object] = {**chosen, "carry_frames": FAMILY_CONTEXT if restarts == "keep" else None}
        settings = choose_settings(base, budget, memory_gb, recent, threshold, reindex_span=FAMILY_SPAN if reindex == "on" else None,
                                   **changes)
        patched, plan = with_tempcache(model, settings, sink)
        text = f"{preset}: {plan}"
        logger.info("FAST-AR TempCache %s", text)
        logger.debug("FAST-AR TempCache settings: %s", asdict(settings))
        show_text(unique_id, text)
        return patched, text


NODE_CLASSES = [FastARTempCache]
