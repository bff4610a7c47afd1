"""Tiny models, VAEs and prompts for sampling tests on the real host, and the sampler node with short defaults."""

from __future__ import annotations

from typing import Any

import torch

from tests_support import Host
from tiny.golden import load_golden
from tiny.host_models import build_host_model

WIDTH, HEIGHT, LENGTH = 48, 32, 21  # 6 latent frames of 2 x 3 tokens
TEXT_DIM = 64
DEFAULTS: dict[str, Any] = {
    "width": WIDTH, "height": HEIGHT, "length": LENGTH, "fps": 0.0, "seed": 5, "cfg": 1.0, "preset": "self_forcing",
    "cache": "preset", "window": 9, "sink": 3, "frames_to": "memory", "decode": "auto", "filename_prefix": "video/test", "batch_size": 1,
}


def tiny_model() -> Any:
    """A fresh ModelPatcher over the random weights of a golden file (4 heads of 32, 2 layers, float32)."""
    golden = load_golden("A5")
    return build_host_model(golden.weights, num_heads=golden.meta["heads"], text_dim=TEXT_DIM, shift=5.0)


def tiny_wan_vae(seed: int = 0) -> Any:
    """The host's VAE object around a Wan VAE of width 4 with random weights."""
    import comfy.ldm.wan.vae
    import comfy.sd

    net = comfy.ldm.wan.vae.WanVAE(dim=4, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, attn_scales=[],
                                   temperal_downsample=[False, True, True])
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for key, value in net.state_dict().items():
        scale = 1.0 if key.endswith("gamma") else max(1, value[0].numel()) ** -0.5
        state[key] = scale * torch.randn(value.shape, generator=generator)
    return comfy.sd.VAE(sd=state)


def text(seed: int, rows: int = 7) -> list[Any]:
    """CONDITIONING of one entry with random rows."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(1, rows, TEXT_DIM, generator=generator), {}]]


def sample(host: Host, model: Any, vae: Any, **changes: Any) -> tuple[torch.Tensor, torch.Tensor, list[Any], str]:
    """The node's outputs: latents [B, 16, T, h, w], images, videos, report."""
    given = {**DEFAULTS, "positive": text(1), **changes}
    out = host.nodes["FastARStreamingSampler"]().sample(model=model, vae=vae, **given)
    latent, images, videos, report = out["result"]
    return latent["samples"], images, videos, report


class CountingCalls:
    """Counts model calls, keeps their text rows and batch sizes, and can raise or act at one of them."""

    def __init__(self, monkeypatch: Any) -> None:
        from comfy.model_base import BaseModel

        self.texts: list[torch.Tensor] = []
        self.batches: list[int] = []
        self.at: dict[int, Any] = {}
        plain = BaseModel.apply_model

        def apply_model(model: Any, x: torch.Tensor, t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if len(self.batches) in self.at:
                self.at[len(self.batches)]()
            self.batches.append(x.shape[0])
            self.texts.append(kwargs["c_crossattn"].clone())
            return plain(model, x, t, *args, **kwargs)

        monkeypatch.setattr(BaseModel, "apply_model", apply_model)
