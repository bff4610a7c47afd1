"""Loaders for the small parts of the demo that no stock loader reads: codec, text encoder, slate, start pictures."""

from __future__ import annotations

from typing import Any

from .host import demo_parts
from .host.folders import demo_files, demo_path, demo_pictures, load_demo_picture

CATEGORY = "FAST-AR/demo"


def _file_input(kind: str, part: str) -> dict[str, Any]:
    tooltip = f"{part} The file that comes with the pack stands first; own ones go to models/fastar_demo."
    return {"required": {"file": (demo_files(kind), {"tooltip": tooltip})}}


class FastARDemoVAE:
    NODE_ID = "FastARDemoVAE"
    DISPLAY_NAME = "FAST-AR Demo VAE Loader"
    CATEGORY = CATEGORY
    DESCRIPTION = "Loads the codec of the demo model as a VAE. It fits no other video model."
    FUNCTION = "load"
    RETURN_TYPES = ("VAE",)
    RETURN_NAMES = ("vae",)
    OUTPUT_TOOLTIPS = ("The demo codec: 8x8 pixels and 4 frames per latent, as in a Wan VAE, but linear.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return _file_input("vae", "Weights of the demo codec.")

    def load(self, file: str) -> tuple[Any]:
        """Return the codec behind the host's VAE interface; raises CheckpointError for another kind of file."""
        return (demo_parts.load_demo_vae(demo_path(file)),)


class FastARDemoText:
    NODE_ID = "FastARDemoText"
    DISPLAY_NAME = "FAST-AR Demo Text Encoder Loader"
    CATEGORY = CATEGORY
    DESCRIPTION = "Loads the text encoder of the demo model as a CLIP for CLIP Text Encode and FAST-AR Prompts."
    FUNCTION = "load"
    RETURN_TYPES = ("CLIP",)
    RETURN_NAMES = ("clip",)
    OUTPUT_TOOLTIPS = ("The demo text encoder. It knows the words of the demo world only.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return _file_input("text", "Weights of the demo text encoder.")

    def load(self, file: str) -> tuple[Any]:
        """Return the encoder as the host's CLIP object; raises CheckpointError for another kind of file."""
        return (demo_parts.load_demo_clip(demo_path(file)),)


class FastARDemoSlate:
    NODE_ID = "FastARDemoSlate"
    DISPLAY_NAME = "FAST-AR Demo Slate"
    CATEGORY = CATEGORY
    DESCRIPTION = "Loads the fixed first latent frame with which every video of the demo model starts."
    FUNCTION = "load"
    RETURN_TYPES = ("LATENT",)
    RETURN_NAMES = ("latent",)
    OUTPUT_TOOLTIPS = ("One latent frame for the start_latent input of the FAST-AR Streaming Sampler.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return _file_input("slate", "The slate latent of the demo model.")

    def load(self, file: str) -> tuple[dict[str, Any]]:
        """Return {"samples": [1, 16, 1, h, w]}; raises CheckpointError for another kind of file."""
        return ({"samples": demo_parts.load_demo_slate(demo_path(file))},)


class FastARDemoPicture:
    NODE_ID = "FastARDemoPicture"
    DISPLAY_NAME = "FAST-AR Demo Picture"
    CATEGORY = CATEGORY
    DESCRIPTION = "A picture of a place of the demo world, to start an image-to-video clip with."
    FUNCTION = "load"
    RETURN_TYPES = ("IMAGE",)
    RETURN_NAMES = ("image",)
    OUTPUT_TOOLTIPS = ("One picture of 128 x 128 pixels for the start_image input of the FAST-AR Streaming Sampler.",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "picture": (demo_pictures(), {"tooltip": "The name says what it shows; the place has no name yet."})
            }
        }

    def load(self, picture: str) -> tuple[Any]:
        """Return the picture as IMAGE [1, 128, 128, 3]; raises FileNotFoundError when it is gone."""
        return (load_demo_picture(picture),)


NODE_CLASSES = [FastARDemoVAE, FastARDemoText, FastARDemoSlate, FastARDemoPicture]
