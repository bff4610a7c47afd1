"""Builds host MODELs from checked state dicts, and lists the weight files the host knows."""

from __future__ import annotations

import logging
from typing import Any

import comfy.model_detection
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy_extras.nodes_model_advanced import ModelSamplingSD3

from ...fastar_core.checkpoint import Checkpoint, load_checkpoint
from ...fastar_core.checkpoint_files import read_metadata
from ...fastar_core.checkpoint_shapes import STOCK_TEXT_DIM, ModelShape
from ...fastar_core.errors import CheckpointError
from ...fastar_core.presets import check_model, resolve_preset
from ...fastar_core.settings import FastARSettings

MODELS = "diffusion_models"
LORAS = "loras"
NO_LORA = "none"
WEIGHT_DTYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "fp8_e4m3fn": {"dtype": torch.float8_e4m3fn},
    "fp8_e4m3fn_fast": {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True},
    "fp8_e5m2": {"dtype": torch.float8_e5m2},
}
logger = logging.getLogger(__name__)


def model_files() -> list[str]:
    """Names of the diffusion model files (models/diffusion_models and models/unet)."""
    return folder_paths.get_filename_list(MODELS)


def lora_files() -> list[str]:
    """Names of the LoRA files, and `NO_LORA` first."""
    return [NO_LORA, *folder_paths.get_filename_list(LORAS)]


def load_streaming_model(
    model_name: str, preset_choice: str, weight_dtype: str, lora_name: str = NO_LORA, lora_strength: float = 1.0
) -> tuple[Any, str]:
    """The host MODEL with the preset's shift and settings on it, and the report text.

    Raises CheckpointError or ConfigError.
    """
    path = folder_paths.get_full_path_or_raise(MODELS, model_name)
    lora = None if lora_name == NO_LORA else folder_paths.get_full_path_or_raise(LORAS, lora_name)
    preset, warnings = resolve_preset(preset_choice, model_name, read_metadata(path))
    checkpoint = load_checkpoint(path, preset.use_ema, lora, lora_strength)
    warnings += checkpoint.findings.warnings + check_model(preset, checkpoint.shape)
    if preset.family == "longlive" and lora is None:
        warnings.append(
            "LongLive 1 is a base file plus a LoRA; choose its lora.pt as 'lora' unless this file is merged already"
        )
    patcher = build_patcher(checkpoint, WEIGHT_DTYPES[weight_dtype])
    if hasattr(patcher, "cached_patcher_init"):
        patcher.cached_patcher_init = (reload_patcher, (path, preset.use_ema, weight_dtype, lora, lora_strength))
    model = with_settings(patcher, FastARSettings(preset=preset), preset.shift)
    lines = [*checkpoint.lines(), f"preset: {preset.key} ({preset.label})", f"note: {preset.notes}"]
    lines.append(f"limits: {preset.limits}")
    lines += [f"host model: {type(model.model).__name__}, flow shift {preset.shift:g}"]
    report = "\n".join(lines + [f"warning: {text}" for text in warnings])
    for text in warnings:
        logger.warning("FAST-AR: %s", text)
    return model, report


def with_settings(patcher: Any, settings: FastARSettings, shift: float) -> Any:
    """A clone with the flow shift set explicitly (class defaults differ: 8 plain, 5 causal) and `settings` attached."""
    (model,) = ModelSamplingSD3().patch(patcher, shift)
    model.model_options.setdefault("transformer_options", {})["fastar"] = settings
    return model


def reload_patcher(
    path: str, use_ema: bool, weight_dtype: str, lora: str | None, strength: float, disable_dynamic: bool = False
) -> Any:
    """Loads the same weights again: newer hosts ask for it when they need a second copy of the model."""
    checkpoint = load_checkpoint(path, use_ema, lora, strength)
    return build_patcher(checkpoint, WEIGHT_DTYPES[weight_dtype], disable_dynamic)


def build_patcher(checkpoint: Checkpoint, options: dict[str, Any], disable_dynamic: bool = False) -> Any:
    """A ModelPatcher of the host's own Wan class holding the checkpoint's weights."""
    state, metadata = dict(checkpoint.state_dict), checkpoint.host_metadata()
    detected = comfy.model_detection.detect_unet_config(state, "", metadata=metadata) or {}
    shape = checkpoint.shape
    told = (detected.get("num_heads"), detected.get("text_dim", STOCK_TEXT_DIM))
    if told != (shape.heads, shape.text_dim):  # the host does not read the metadata
        return _build_with_sizes(state, metadata, options, shape)
    extra = {"disable_dynamic": True} if disable_dynamic else {}
    patcher = comfy.sd.load_diffusion_model_state_dict(state, model_options=dict(options), metadata=metadata, **extra)
    if patcher is None:
        raise CheckpointError(f"{checkpoint.name}: this ComfyUI does not recognise the model ({shape}); update ComfyUI")
    return patcher


def _build_with_sizes(
    state: dict[str, torch.Tensor], metadata: dict[str, str], options: dict[str, Any], shape: ModelShape
) -> Any:
    """For hosts that fix head size and text width: the same steps as the stock loader, with the true sizes put in."""
    management = comfy.model_management
    config = comfy.model_detection.model_config_from_unet(state, "", metadata=metadata)
    config.unet_config.update(num_heads=shape.heads, text_dim=shape.text_dim)
    device, offload = management.get_torch_device(), management.unet_offload_device()
    supported = list(config.supported_inference_dtypes)
    dtype = options.get("dtype") or management.unet_dtype(
        model_params=comfy.utils.calculate_parameters(state),
        supported_dtypes=supported,
        weight_dtype=comfy.utils.weight_dtype(state),
    )
    config.set_inference_dtype(dtype, management.unet_manual_cast(dtype, device, config.supported_inference_dtypes))
    if options.get("fp8_optimizations", False):
        config.optimizations["fp8"] = True
    model = config.get_model(state, "").to(offload)
    model.load_model_weights(state, "")
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=offload)
