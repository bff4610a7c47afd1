"""Random native Wan weights of any size. Modulation is random too: with gates near zero a test would pass whatever attention does."""

from __future__ import annotations

import torch
from torch import Tensor


def random_weights(dim: int = 128, layers: int = 2, ffn: int = 256, text_dim: int = 64, channels: int = 16, seed: int = 1,
                   std: float = 0.05, peak: float = 1.0) -> dict[str, Tensor]:
    """A complete state dict (15 + 27 names per layer, float32), N(0, std), norm weights 1.

    ``peak``: weights of the query and key norms; above 1 attention looks at few keys, so that every one of them matters.
    """
    linears: dict[str, tuple[int, ...]] = {
        "patch_embedding": (dim, channels, 1, 2, 2), "text_embedding.0": (dim, text_dim), "text_embedding.2": (dim, dim),
        "time_embedding.0": (dim, 256), "time_embedding.2": (dim, dim), "time_projection.1": (6 * dim, dim),
        "head.head": (4 * channels, dim)}
    plain: dict[str, tuple[int, ...]] = {"head.modulation": (1, 2, dim)}
    ones: list[str] = []
    for layer in range(layers):
        name = f"blocks.{layer}"
        plain[name + ".modulation"] = (1, 6, dim)
        linears |= {f"{name}.{kind}_attn.{part}": (dim, dim) for kind in ("self", "cross") for part in "qkvo"}
        linears |= {name + ".ffn.0": (ffn, dim), name + ".ffn.2": (dim, ffn), name + ".norm3": (dim,)}
        ones += [f"{name}.{kind}_attn.norm_{part}" for kind in ("self", "cross") for part in "qk"]
    generator = torch.Generator().manual_seed(seed)
    weights = {key: std * torch.randn(shape, generator=generator) for key, shape in plain.items()}
    for name, shape in linears.items():
        weights[name + ".weight"] = std * torch.randn(shape, generator=generator)
        weights[name + ".bias"] = std * torch.randn(shape[:1], generator=generator)
    weights |= {f"blocks.{layer}.norm3.weight": torch.ones(dim) for layer in range(layers)}
    weights |= {name + ".weight": torch.full((dim,), peak) for name in ones}
    return weights
