"""Builds the host's own Wan class from an explicit configuration, for models whose sizes no host tells from shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tiny.wan_plain import layer_count


def unet_config(state_dict: Mapping[str, torch.Tensor], num_heads: int, text_dim: int) -> dict[str, Any]:
    """The host's configuration of a text-to-video Wan model, nothing in it guessed from head sizes."""
    return {
        "image_model": "wan2.1",
        "model_type": "t2v",
        "dim": state_dict["head.modulation"].shape[-1],
        "out_dim": state_dict["head.head.weight"].shape[0] // 4,
        "in_dim": state_dict["patch_embedding.weight"].shape[1],
        "ffn_dim": state_dict["blocks.0.ffn.0.weight"].shape[0],
        "num_layers": layer_count(state_dict),
        "num_heads": num_heads,
        "text_dim": text_dim,
        "patch_size": (1, 2, 2),
        "freq_dim": 256,
        "window_size": (-1, -1),
        "qk_norm": True,
        "cross_attn_norm": True,
        "eps": 1e-6,
    }


def build_host_model(state_dict: Mapping[str, torch.Tensor], *, num_heads: int, text_dim: int, shift: float) -> Any:
    """A float32 ModelPatcher holding `state_dict` (native names, every weight present), with the given flow shift.

    The host must be imported already (fixture `host`). Raises AssertionError when a weight finds no place.
    """
    import comfy.model_detection
    import comfy.model_management
    import comfy.model_patcher
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    config = comfy.model_detection.model_config_from_unet_config(unet_config(state_dict, num_heads, text_dim))
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "")
    missing, unexpected = model.diffusion_model.load_state_dict(dict(state_dict), strict=False)
    assert not missing, missing
    assert not unexpected, unexpected
    device, offload = comfy.model_management.get_torch_device(), comfy.model_management.unet_offload_device()
    patcher = comfy.model_patcher.ModelPatcher(model.to(offload), load_device=device, offload_device=offload)
    return ModelSamplingSD3().patch(patcher, shift)[0]
