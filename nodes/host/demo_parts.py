"""The demo model's own parts behind the host's interfaces: a linear codec as VAE, a whole-word text encoder as CLIP.

Both are real host objects, so every stock node takes them. Files are plain .safetensors with a `fastar_demo` metadata
entry that says which part they hold.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

import comfy.latent_formats
import comfy.model_patcher
import comfy.sd
import comfy.text_encoders.wan
import torch
from comfy import sd1_clip
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...fastar_core.errors import CheckpointError

CHANNELS, PATCH, TIME = 16, 8, 4
END, UNKNOWN, TEXT_ROWS = 1, 2, 512
CODEC_KEYS = {"mean": (768,), "basis": (CHANNELS, 768), "scale": (1,)}


def _read(path: str, part: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and description of a demo file. Raises CheckpointError for anything else."""
    try:
        with safe_open(path, framework="pt") as file:
            described = json.loads((file.metadata() or {}).get("fastar_demo", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError, ValueError) as reason:
        raise CheckpointError(
            f"{path} cannot be read as a .safetensors file ({reason}); choose fastar_demo_{part}"
            ".safetensors from the pack's example_workflows/models"
        ) from reason
    if described.get("part") != part:
        raise CheckpointError(
            f"{path} holds {described.get('part') or 'no part'} of the demo model where {part} is "
            f"expected; choose the file fastar_demo_{part}.safetensors"
        )
    return tensors, described


class LinearCodec(torch.nn.Module):
    """PCA of 4x8x8x3 pixel patches to 16 channels. Latent frames are independent; the first one is one pixel frame."""

    frames_independent = True
    mean: Tensor
    basis: Tensor
    scale: Tensor
    format_mean: Tensor
    format_std: Tensor

    def __init__(self, mean: Tensor, basis: Tensor, scale: Tensor) -> None:
        super().__init__()
        wan = comfy.latent_formats.Wan21()
        for name, value in (("mean", mean), ("basis", basis), ("scale", scale)):
            self.register_parameter(name, torch.nn.Parameter(value.float(), requires_grad=False))
        self.register_buffer("format_mean", wan.latents_mean.reshape(1, CHANNELS, 1, 1, 1), persistent=False)
        self.register_buffer("format_std", wan.latents_std.reshape(1, CHANNELS, 1, 1, 1), persistent=False)
        self.preview_format = self._preview_format()

    def _preview_format(self) -> comfy.latent_formats.LatentFormat:
        """What the host's latent previewer needs for true colours: the mean colour of a patch, which it wants in -1..1."""
        shown = comfy.latent_formats.Wan21()
        colour = self.basis.reshape(CHANNELS, -1, 3).mean(1) * self.scale
        shown.latent_rgb_factors = (2 * colour).tolist()
        shown.latent_rgb_factors_bias = (2 * self.mean.reshape(-1, 3).mean(0) - 1).tolist()
        shown.taesd_decoder_name = None
        return shown

    def encode(self, pixels: Tensor, *_: Any, **__: Any) -> Tensor:
        """Pixels [B, 3, F, H, W] in 0..1, H and W multiples of 8 -> latents [B, 16, 1 + ceil((F-1)/4), H/8, W/8].

        A last group of fewer than four frames is filled with its last frame.
        """
        b, c, f, h, w = pixels.shape
        tail = -(f - 1) % TIME
        frames = torch.cat(
            (pixels[:, :, :1].expand(-1, -1, TIME - 1, -1, -1), pixels, pixels[:, :, -1:].expand(-1, -1, tail, -1, -1)),
            2,
        )
        grid = frames.reshape(b, c, -1, TIME, h // PATCH, PATCH, w // PATCH, PATCH)
        rows = grid.permute(0, 2, 4, 6, 3, 5, 7, 1).flatten(4)
        latent = ((rows - self.mean) @ self.basis.T / self.scale).permute(0, 4, 1, 2, 3)
        return latent * self.format_std + self.format_mean

    def decode(self, latents: Tensor, *_: Any, **__: Any) -> Tensor:
        """Latents [B, 16, T, h, w] -> pixels [B, 3, 1 + 4(T-1), 8h, 8w]."""
        model = (latents - self.format_mean) / self.format_std
        b, _c, t, h, w = model.shape
        rows = model.permute(0, 2, 3, 4, 1) * self.scale @ self.basis + self.mean
        grid = rows.reshape(b, t, h, w, TIME, PATCH, PATCH, 3).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return grid.reshape(b, 3, t * TIME, h * PATCH, w * PATCH)[:, :, TIME - 1 :]


def _identity(image: Tensor) -> Tensor:
    return image


def _clamp(image: Tensor) -> Tensor:
    return image.clamp_(0.0, 1.0)


def _latent_bytes(shape: Sequence[int], _dtype: torch.dtype) -> int:
    return int(2 * TIME * PATCH * PATCH * 3 * math.prod(shape[-3:]) * 4)


def _pixel_bytes(shape: Sequence[int], _dtype: torch.dtype) -> int:
    return int(2 * 3 * math.prod(shape[-3:]) * 4)


class DemoVAE(comfy.sd.VAE):
    """The host's VAE object around the linear codec, with the sizes of a Wan 2.1 VAE."""

    patcher: Any

    def __init__(self, codec: LinearCodec) -> None:
        super().__init__(sd={"pixel_space_vae": torch.tensor(1.0)}, dtype=torch.float32)
        self.first_stage_model = codec.to(self.vae_dtype).eval()
        self.patcher = comfy.model_patcher.ModelPatcher(
            codec, load_device=self.device, offload_device=self.patcher.offload_device
        )
        self.latent_channels, self.latent_dim, self.output_channels = CHANNELS, 3, 3
        self.upscale_ratio = (lambda a: max(0, a * TIME - 3), PATCH, PATCH)
        self.downscale_ratio = (lambda a: max(0, math.floor((a + 3) / TIME)), PATCH, PATCH)
        self.upscale_index_formula = self.downscale_index_formula = (TIME, PATCH, PATCH)
        self.process_input, self.process_output = _identity, _clamp
        self.memory_used_decode, self.memory_used_encode = _latent_bytes, _pixel_bytes
        self.size = None
        self.model_size()


def load_demo_vae(path: str) -> Any:
    """The demo codec as the host's VAE. Raises CheckpointError when `path` holds something else."""
    tensors, _ = _read(path, "vae")
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    if shapes != CODEC_KEYS:
        raise CheckpointError(
            f"{path} holds tensors {shapes}, a demo codec has {CODEC_KEYS}; take the file of the pack"
        )
    return DemoVAE(LinearCodec(**tensors))


def load_demo_slate(path: str) -> Tensor:
    """The start latent of text-to-video clips [1, 16, 1, 16, 16] as a LATENT holds it (the VAE's space)."""
    tensors, _ = _read(path, "slate")
    if set(tensors) != {"slate"} or tensors["slate"].shape != (1, CHANNELS, 1, 16, 16):
        raise CheckpointError(f"{path} holds {sorted(tensors)}, expected one tensor `slate` [1, 16, 1, 16, 16]")
    return comfy.latent_formats.Wan21().process_out(tensors["slate"].float())


class _Words:
    """Whole-word tokenizer with the interface the host expects of one."""

    def __init__(self, words: Sequence[str]) -> None:
        self.index = {word: number for number, word in enumerate(words)}

    @classmethod
    def from_pretrained(cls, words: Sequence[str], **_: Any) -> _Words:
        return cls(words)

    def get_vocab(self) -> dict[str, int]:
        return self.index

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Lower-case words without punctuation; unknown ones become <unk>; the end token comes last."""
        found = re.findall(r"[a-z0-9]+", text.lower())[: TEXT_ROWS - 1]
        return {"input_ids": [self.index.get(word, UNKNOWN) for word in found] + [END]}


class _DemoTokenizer(sd1_clip.SDTokenizer):
    """Pads to 512 rows as the Wan tokenizer does; what is longer is cut."""

    def __init__(self, embedding_directory: str | None = None, tokenizer_data: dict[str, Any] | None = None) -> None:
        data = tokenizer_data or {}
        super().__init__(
            data["words"],
            pad_with_end=False,
            embedding_size=4096,
            embedding_key="umt5xxl",
            tokenizer_class=_Words,
            has_start_token=False,
            pad_to_max_length=False,
            max_length=99999999,
            min_length=TEXT_ROWS,
            pad_token=0,
            tokenizer_data=data,
        )

    def tokenize_with_weights(self, text: str, return_word_ids: bool = False, **kwargs: Any) -> list[list[Any]]:
        batches = super().tokenize_with_weights(text, return_word_ids, **kwargs)
        return [row if len(row) <= TEXT_ROWS else [*row[: TEXT_ROWS - 1], row[-1]] for row in batches]


class _DemoTokenizers(sd1_clip.SD1Tokenizer):
    def __init__(self, embedding_directory: str | None = None, tokenizer_data: dict[str, Any] | None = None) -> None:
        super().__init__(
            embedding_directory=embedding_directory,
            tokenizer_data=tokenizer_data or {},
            clip_name="umt5xxl",
            tokenizer=_DemoTokenizer,
        )


class _Target:
    """What the host's CLIP asks of a model description."""

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}
        self.clip = comfy.text_encoders.wan.te()
        self.tokenizer = _DemoTokenizers


def load_demo_clip(path: str) -> Any:
    """The demo text encoder as the host's CLIP. Raises CheckpointError when `path` holds something else."""
    tensors, described = _read(path, "text")
    config, words = described.get("config"), described.get("words")
    if not isinstance(config, dict) or not isinstance(words, list) or "shared.weight" not in tensors:
        raise CheckpointError(
            f"{path} lacks its word list, its sizes or its weights; take the file that came with the pack"
        )
    options = {"umt5xxl_model_config": {**config, "vocab_size": len(words)}, "dtype": torch.float32}
    clip = comfy.sd.CLIP(
        _Target(),
        tokenizer_data={"words": words},
        model_options=options,
        parameters=sum(value.numel() for value in tensors.values()),
    )
    missing, unexpected = clip.load_sd({name: value.float() for name, value in tensors.items()})
    if missing or unexpected:
        raise CheckpointError(
            f"{path} does not fit the demo text encoder: missing {sorted(missing)}, "
            f"unexpected {sorted(unexpected)}; take the file that came with the pack"
        )
    return clip
