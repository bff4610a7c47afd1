"""The two sampler nodes: one that makes a whole streaming video, one SAMPLER for the host's Custom Sampling nodes."""

from __future__ import annotations

from typing import Any

import torch

from ..fastar_core.decode_plan import MODES
from ..fastar_core.presets import AUTO, preset_keys
from ..fastar_core.run_choice import CACHE_CHOICES, SWITCH_CHOICES
from ..fastar_core.stream_choice import FRAMES_CHOICES
from .host import plain_sampler, stream_job

_HELP = {
    "preset": "How the model family is sampled. 'auto' takes what FAST-AR Load Streaming Model put on the model; choose it "
              "yourself for a model from another loader.",
    "cache": "What later frames can see: 'preset' = what FAST-AR TempCache put on the model, else as the model's authors do, 'full' "
             "= everything (memory grows with length), 'sink_window' = the first frames and the most recent ones.",
    "window": "Only for cache sink_window: latent frames seen in all, the sink and the block being made included.",
    "sink": "Only for cache sink_window: latent frames at the beginning that always stay visible.",
    "width": "Width of the video in pixels, a multiple of 8.",
    "height": "Height of the video in pixels, a multiple of 8.",
    "length": "Frames of the video. Enough latent frames (4 frames each, the first 1) are computed, the surplus is cut.",
    "fps": "Frames per second of the video; 0 = what the preset was trained for.",
    "seed": "Start of the random numbers; the same seed and settings give the same video.",
    "cfg": "Strength of the negative prompt. 1 = off, as distilled models want it; other values take twice the time.",
    "frames_to": "'memory': all frames come out as IMAGE. 'file': they are written to the output folder block by block and "
                 "IMAGE is the last block, so that memory does not grow. 'auto': file above 129 frames.",
    "decode": "When the VAE works: between the blocks (the video grows while it is made) or at the end (needs less memory "
              "at once). 'auto' decides by memory.",
    "filename_prefix": "For frames_to file: name in the output folder, as in Save Video (%year%, %width% and so on work).",
    "batch_size": "Videos made at the same time, each with noise of its own.",
    "model": "A causal Wan model, from FAST-AR Load Streaming Model or Load Diffusion Model.",
    "positive": "The prompt of the whole video; not used when prompts is connected.",
    "vae": "The VAE that belongs to the model (Wan 2.1 VAE).",
    "negative": "What to avoid; only used when cfg is not 1.",
    "prompts": "Prompts that change over time, from FAST-AR Prompts.",
    "prompt_switch": "What the cache does when a prompt of prompts begins: 'preset' = as the model's authors do, 'keep' = the last "
                     "frames are recomputed in the new prompt and the sink stays, 'drop' = the sink goes too, 'rebuild' = all "
                     "frames are recomputed, 'none' = nothing is.",
    "start_image": "First frame of the video, or the first frames of a clip to go on from.",
    "start_latent": "Finished latents to go on from; they stay as the first frames.",
}


def _input(name: str, kind: Any, **options: Any) -> dict[str, Any]:
    return {name: (kind, {**options, "tooltip": _HELP[name]})}


def _cache_inputs() -> dict[str, Any]:
    return {
        **_input("preset", [AUTO, *preset_keys()], default=AUTO),
        **_input("cache", list(CACHE_CHOICES), default="preset"),
        **_input("window", "INT", default=12, min=2, max=100000, advanced=True),
        **_input("sink", "INT", default=3, min=0, max=100000, advanced=True),
    }


def _video_inputs() -> dict[str, Any]:
    return {
        **_input("width", "INT", default=832, min=16, max=8192, step=8),
        **_input("height", "INT", default=480, min=16, max=8192, step=8),
        **_input("length", "INT", default=81, min=1, max=1000000),
        **_input("fps", "FLOAT", default=0.0, min=0.0, max=240.0, step=0.01),
        **_input("seed", "INT", default=0, min=0, max=2**64 - 1, control_after_generate=True),
        **_input("cfg", "FLOAT", default=1.0, min=0.0, max=100.0, step=0.1, round=0.01),
    }


def _output_inputs() -> dict[str, Any]:
    return {
        **_input("frames_to", list(FRAMES_CHOICES), default="auto"),
        **_input("decode", list(MODES), default="auto"),
        **_input("filename_prefix", "STRING", default="video/FAST-AR"),
        **_input("batch_size", "INT", default=1, min=1, max=64),
    }


class FastARStreamingSampler:
    NODE_ID = "FastARStreamingSampler"
    DISPLAY_NAME = "FAST-AR Streaming Sampler"
    CATEGORY = "FAST-AR"
    DESCRIPTION = ("Makes a video of any length block by block: every block sees what came before it through a cache, is "
                   "decoded, and can go straight into a file.")
    FUNCTION = "sample"
    OUTPUT_NODE = True
    RETURN_TYPES = ("LATENT", "IMAGE", "VIDEO", "STRING")
    RETURN_NAMES = ("latent", "images", "video", "report")
    OUTPUT_IS_LIST = (False, False, True, False)
    OUTPUT_TOOLTIPS = (
        "The latents of the whole video.",
        "The frames; with frames_to file only those of the last block.",
        "The video, one for each row of the batch; with frames_to file it is the written file.",
        "What was run, as JSON: settings, plan, counts, bytes, times, warnings.",
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        sockets = {"model": "MODEL", "positive": "CONDITIONING", "vae": "VAE", "negative": "CONDITIONING",
                   "prompts": "FASTAR_PROMPTS", "start_image": "IMAGE", "start_latent": "LATENT"}
        given = {name: _input(name, kind)[name] for name, kind in sockets.items()}
        needed = {name: given.pop(name) for name in ("model", "positive", "vae")}
        return {
            "required": {**needed, **_video_inputs(), **_cache_inputs(), **_output_inputs()},
            "optional": {**given, **_input("prompt_switch", list(SWITCH_CHOICES), default="preset", advanced=True)},
            "hidden": {"prompt": "PROMPT", "extra_pnginfo": "EXTRA_PNGINFO", "unique_id": "UNIQUE_ID"},
        }

    def sample(self, **inputs: Any) -> dict[str, Any]:
        """Runs the whole video; see StreamJob for what can go wrong."""
        with torch.no_grad():
            result = stream_job.StreamJob(stream_job.StreamInputs(**inputs)).run()
        return {"ui": result.ui, "result": ({"samples": result.latent}, result.images, result.videos, result.report)}


class FastARSampler:
    NODE_ID = "FastARSampler"
    DISPLAY_NAME = "FAST-AR Sampler"
    CATEGORY = "FAST-AR"
    DESCRIPTION = ("The streaming engine as a SAMPLER for SamplerCustomAdvanced. It uses the sigmas given there; decoding and "
                   "files are left to other nodes.")
    FUNCTION = "make"
    RETURN_TYPES = ("SAMPLER",)
    RETURN_NAMES = ("sampler",)
    OUTPUT_TOOLTIPS = ("Connect it to SamplerCustomAdvanced.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": _cache_inputs()}

    def make(self, preset: str, cache: str, window: int, sink: int) -> tuple[Any]:
        """The sampler; it holds choices only, so runs that share it share nothing else."""
        return (plain_sampler.make_plain_sampler(preset, cache, window, sink),)


NODE_CLASSES = [FastARStreamingSampler, FastARSampler]
