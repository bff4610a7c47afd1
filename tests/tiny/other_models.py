"""Tiny random models of the host's other video classes, as ModelPatchers, with what is needed to sample them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastar_pack.fastar_core.noise import seeded_normal

WAN = {"image_model": "wan2.1", "dim": 48, "out_dim": 16, "in_dim": 16, "ffn_dim": 64, "num_layers": 2, "num_heads": 2, "text_dim": 8,
       "patch_size": (1, 2, 2), "freq_dim": 256, "window_size": (-1, -1), "qk_norm": True, "cross_attn_norm": True, "eps": 1e-6}
CONFIGS: dict[str, dict[str, Any]] = {
    "wan t2v": WAN | {"model_type": "t2v"},
    "wan i2v": WAN | {"model_type": "i2v", "in_dim": 36},
    "ltxv": {"image_model": "ltxv", "in_channels": 128, "cross_attention_dim": 64, "attention_head_dim": 32, "num_attention_heads": 2,
             "caption_channels": 16, "num_layers": 2},
    "hunyuan": {"image_model": "hunyuan_video", "in_channels": 16, "out_channels": 16, "patch_size": [1, 2, 2], "hidden_size": 96,
                "num_heads": 2, "depth": 1, "depth_single_blocks": 2, "mlp_ratio": 2.0, "qkv_bias": True, "guidance_embed": True,
                "context_in_dim": 16, "vec_in_dim": 8, "axes_dim": [16, 16, 16], "theta": 256, "byt5": False, "meanflow": False,
                "use_cond_type_embedding": False, "vision_in_dim": None},
    "mochi": {"image_model": "mochi_preview", "depth": 1, "patch_size": 2, "num_heads": 24, "hidden_size_x": 1536, "hidden_size_y": 96,
              "mlp_ratio_x": 8.0, "mlp_ratio_y": 2.0, "learn_sigma": False, "in_channels": 12, "qk_norm": True, "qkv_bias": False,
              "out_bias": True, "attn_drop": 0.0, "patch_embed_bias": True, "posenc_preserve_area": True,
              "timestep_mlp_bias": True, "attend_to_padding": False, "timestep_scale": 1000.0, "use_t5": True, "t5_feat_dim": 16,
              "t5_token_length": 24, "rope_theta": 10000.0},
    "cogvideox": {"image_model": "cogvideox", "num_attention_heads": 2, "attention_head_dim": 64, "in_channels": 16, "out_channels": 16,
                  "time_embed_dim": 32, "text_embed_dim": 16, "num_layers": 2, "patch_size": 2, "sample_width": 16, "sample_height": 16,
                  "use_rotary_positional_embeddings": True},
}
TEXT_WIDTH = {"wan t2v": 8, "wan i2v": 8, "ltxv": 16, "hunyuan": 16, "mochi": 16, "cogvideox": 16}
CHANNELS = {"wan t2v": 16, "wan i2v": 16, "ltxv": 128, "hunyuan": 16, "mochi": 12, "cogvideox": 16}


def build(kind: str, seed: int = 3) -> Any:
    """A float32 ModelPatcher with N(0, 0.1) weights everywhere (norms included: about 1)."""
    import comfy.model_detection
    import comfy.model_management
    import comfy.model_patcher

    settings = dict(CONFIGS[kind])
    if kind == "hunyuan":
        from comfy.ldm.hunyuan_video.model import HunyuanVideoParams

        settings |= {name: False for name in ("meanflow_sum",) if name in HunyuanVideoParams.__dataclass_fields__}
    config = comfy.model_detection.model_config_from_unet_config(settings)
    assert config is not None, f"the host does not know {kind}"
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model({}, "")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.diffusion_model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator) * (0.1 if weight.numel() < 1_000_000 else 0.02)
            weight.copy_(1 + noise if "norm" in name and name.endswith("weight") else noise)
    device, offload = comfy.model_management.get_torch_device(), comfy.model_management.unet_offload_device()
    return comfy.model_patcher.ModelPatcher(model.to(offload), load_device=device, offload_device=offload)


def conditioning(kind: str, seed: int = 5, words: int = 7, rows: int = 24) -> list:
    """A prompt of ``words`` distinct rows and zero rows behind them."""
    text = torch.zeros(1, rows, TEXT_WIDTH[kind])
    text[:, :words] = seeded_normal(seed, (1, words, TEXT_WIDTH[kind]))
    extra: dict[str, Any] = {}
    if kind == "hunyuan":
        extra["pooled_output"] = seeded_normal(seed + 1, (1, 8))
    if kind in ("mochi", "ltxv"):
        extra["attention_mask"] = torch.ones(1, rows, dtype=torch.long)
    if kind == "wan i2v":
        class Vision:
            penultimate_hidden_states = seeded_normal(seed + 2, (1, 257, 1280))
        extra["clip_vision_output"] = Vision()
    return [[text, extra]]


def latent(kind: str, frames: int = 6, rows: int = 8, columns: int = 12) -> Tensor:
    return seeded_normal(11, (1, CHANNELS[kind], frames, rows, columns))


def sample(patcher: Any, kind: str, sampler: str = "euler", steps: int = 4, cfg: float = 1.0, noise: Tensor | None = None) -> Tensor:
    """Latents after a few steps of one of the host's own samplers."""
    import comfy.samplers

    noise = latent(kind) if noise is None else noise
    guider = comfy.samplers.CFGGuider(patcher)
    guider.set_conds(conditioning(kind), conditioning(kind, 8, 2))
    guider.set_cfg(cfg)
    sigmas = comfy.samplers.calculate_sigmas(patcher.get_model_object("model_sampling"), "simple", steps)
    with torch.inference_mode():
        return guider.sample(noise.clone(), torch.zeros_like(noise), comfy.samplers.sampler_object(sampler), sigmas, seed=1,
                             disable_pbar=True).float().clone()
