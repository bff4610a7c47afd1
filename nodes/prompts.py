"""FAST-AR Prompts: text with a start frame per line -> conditionings with their start frames."""

from __future__ import annotations

from typing import Any

from ..fastar_core.errors import ConfigError
from ..fastar_core.prompts import parse_prompt_lines, prompt_table

_TEXT_HELP = (
    "One prompt per line: 'frame: text' or '2.5s: text'. The first line may go without a start: it holds from frame 0. "
    "Frames are frames of the finished video. Lines that begin with # and blank lines are ignored."
)


class FastARPrompts:
    NODE_ID = "FastARPrompts"
    DISPLAY_NAME = "FAST-AR Prompts"
    CATEGORY = "FAST-AR/conditioning"
    DESCRIPTION = (
        "Encodes a list of prompts for one video. A prompt takes effect at the first block that starts at its frame or "
        "later."
    )
    FUNCTION = "encode"
    RETURN_TYPES = ("FASTAR_PROMPTS", "STRING", "CONDITIONING")
    RETURN_NAMES = ("prompts", "table", "first")
    OUTPUT_TOOLTIPS = (
        "The encoded prompts with their first latent frames, for the FAST-AR Streaming Sampler.",
        "The list as it was read: seconds, frame, latent frame and text of each prompt.",
        "The prompt of frame 0 alone, for the positive input of the sampler.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "clip": ("CLIP", {"tooltip": "The text encoder that belongs to the video model."}),
                "text": ("STRING", {"multiline": True, "dynamicPrompts": True, "tooltip": _TEXT_HELP}),
                "fps": (
                    "FLOAT",
                    {
                        "default": 16.0,
                        "min": 1.0,
                        "max": 240.0,
                        "step": 0.01,
                        "tooltip": "Frames per second of the video, as in the sampler; turns seconds into frames.",
                    },
                ),
            }
        }

    @classmethod
    def VALIDATE_INPUTS(cls, text: str | None, fps: float | None) -> bool | str:
        """Report a syntax error before anything is loaded; linked inputs are None here and are read in encode."""
        if text is None or fps is None:
            return True
        try:
            parse_prompt_lines(text, fps)
        except ConfigError as error:
            return str(error)
        return True

    def encode(self, clip: Any, text: str, fps: float) -> tuple[list[tuple[int, Any]], str, Any]:
        """Return ([(first latent frame, CONDITIONING)], table, first); equal texts are encoded once."""
        if clip is None:
            raise ConfigError(
                "clip is None: the loader in front holds no text encoder; load one, for example with Load CLIP"
            )
        prompts = parse_prompt_lines(text, fps)
        texts = dict.fromkeys(prompt.text for prompt in prompts)
        encoded = {text: clip.encode_from_tokens_scheduled(clip.tokenize(text)) for text in texts}
        listed = [(p.latent_frame, encoded[p.text]) for p in prompts]
        return listed, prompt_table(prompts, fps), listed[0][1]


NODE_CLASSES = [FastARPrompts]
