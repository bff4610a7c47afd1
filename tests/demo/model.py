"""The demo's Wan weights and its teacher-forced forward: [start latent | clean blocks | noisy blocks] in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.world import BLOCK
from tiny import wan_plain

DIM, HEADS, LAYERS, FFN, CHANNELS, GRID = 256, 2, 5, 512, 16, 8
FRAME = GRID * GRID
TEXT_DIM = 4096
SIGMAS = (1.0, 0.9375, 5 / 6, 0.625)


def _spatial_prior(weights: dict[str, Tensor], layer: int, sharp: float) -> None:
    """Head 0 starts by attending to its own place in every frame: equal biases on fast row and column pairs."""
    name = f"blocks.{layer}.self_attn"
    frame, rows, _ = wan_plain.rope_axes(DIM // HEADS)
    for start in (frame, frame + rows):
        fast = torch.arange(start, start + 16, 2)
        for kind in "qk":
            weights[f"{name}.{kind}.bias"][fast] = 4.0
            weights[f"{name}.norm_{kind}.weight"][fast] = sharp


def init_model(seed: int) -> dict[str, Tensor]:
    """Fresh fp32 weights: the input noise reaches the head at once, query and key projections start equal."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=g) * std

    patch = torch.linalg.qr(normal(DIM, CHANNELS * 4, std=1.0)).Q
    out_rows = patch.T.reshape(CHANNELS, 4, DIM).permute(1, 0, 2).reshape(CHANNELS * 4, DIM)
    w = {"patch_embedding.weight": patch.reshape(DIM, CHANNELS, 1, 2, 2).clone(), "patch_embedding.bias": torch.zeros(DIM),
         "head.head.weight": out_rows * 0.5, "head.head.bias": torch.zeros(CHANNELS * 4),
         "head.modulation": torch.zeros(1, 2, DIM)}
    sizes = {"text_embedding.0": (DIM, TEXT_DIM), "text_embedding.2": (DIM, DIM), "time_embedding.0": (DIM, 256),
             "time_embedding.2": (DIM, DIM), "time_projection.1": (6 * DIM, DIM)}
    for layer in range(LAYERS):
        name = f"blocks.{layer}"
        for part in ("self_attn", "cross_attn"):
            sizes |= {f"{name}.{part}.{kind}": (DIM, DIM) for kind in "qkvo"}
            w |= {f"{name}.{part}.norm_{kind}.weight": torch.ones(DIM) for kind in "qk"}
        sizes |= {f"{name}.ffn.0": (FFN, DIM), f"{name}.ffn.2": (DIM, FFN)}
        w |= {f"{name}.norm3.weight": torch.ones(DIM), f"{name}.norm3.bias": torch.zeros(DIM)}
        w[f"{name}.modulation"] = torch.zeros(1, 6, DIM)
        w[f"{name}.modulation"][:, (2, 5)] = 1.0
    for name, shape in sizes.items():
        small = name.endswith((".o", "ffn.2")) or name == "time_projection.1"
        w[name + ".weight"] = normal(*shape, std=(0.3 if small else 1.0) / shape[1]**0.5)
        w[name + ".bias"] = torch.zeros(shape[0])
    for layer in range(LAYERS):
        w[f"blocks.{layer}.self_attn.k.weight"] = w[f"blocks.{layer}.self_attn.q.weight"].clone()
        _spatial_prior(w, layer, 2.0 if layer % 2 == 0 else 1.3)
    return w


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    """q [B, N, H, d], k and v [B, M, H, d], bias [B, M] -> [B, N, H, d]; plain products are fastest in bf16 on CPUs."""
    b, n, h, d = q.shape
    q, k, v = (x.transpose(1, 2).reshape(b * h, -1, d) for x in (q * d**-0.5, k, v))
    score = torch.bmm(q, k.transpose(1, 2))
    if bias is not None:
        score = score + bias.to(score.dtype).repeat_interleave(h, 0)[:, None]
    return torch.bmm(score.softmax(-1), v).unflatten(0, (b, h)).transpose(1, 2)


@dataclass
class Layout:
    """Where the tokens of one teacher-forced batch stand.

    starts: first latent frame of each block; the start latent stands at `origin`. learn: number of the first block
    that is denoised; the blocks before it are history only. All blocks but the last have a clean copy.
    """

    origin: int
    starts: Sequence[int]
    learn: int

    @property
    def clean_frames(self) -> int:
        return 1 + BLOCK * (len(self.starts) - 1)

    def positions(self) -> Tensor:
        """[tokens, 3]: start latent, clean blocks, noisy blocks."""
        parts = [wan_plain.grid_positions(1, GRID, GRID, self.origin)]
        for start in (*self.starts[:-1], *self.starts[self.learn:]):
            parts.append(wan_plain.grid_positions(BLOCK, GRID, GRID, start))
        return torch.cat(parts)


class TeacherForced:
    """Attention of one batch: clean blocks see earlier clean blocks and themselves, noisy blocks earlier clean ones."""

    def __init__(self, layout: Layout, text_bias: Tensor, dtype: torch.dtype) -> None:
        """text_bias [B, blocks, L] for the prompts of all blocks."""
        cos, sin = wan_plain.rope_table(layout.positions(), DIM // HEADS)
        self.cos, self.sin = cos.to(dtype), sin.to(dtype)
        self.layout, self.text_bias = layout, text_bias
        self.span = BLOCK * FRAME
        self.clean = layout.clean_frames * FRAME

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (wan_plain.rope_apply(x, self.cos, self.sin) for x in (q, k))
        out, begin = [softmax_attention(q[:, :FRAME], k[:, :FRAME], v[:, :FRAME])], FRAME
        for _ in self.layout.starts[:-1]:
            end = begin + self.span
            out.append(softmax_attention(q[:, begin:end], k[:, :end], v[:, :end]))
            begin = end
        for number in range(self.layout.learn, len(self.layout.starts)):
            end, seen = begin + self.span, FRAME + number * self.span
            own_k = torch.cat((k[:, :seen], k[:, begin:end]), 1)
            own_v = torch.cat((v[:, :seen], v[:, begin:end]), 1)
            out.append(softmax_attention(q[:, begin:end], own_k, own_v))
            begin = end
        return torch.cat(out, 1)

    def cross(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = len(self.layout.starts)
        k, v = (x.unflatten(1, (blocks, -1)) for x in (k, v))
        bounds = [(0, FRAME, 0)]
        for number in (*range(blocks - 1), *range(self.layout.learn, blocks)):
            bounds.append((bounds[-1][1], bounds[-1][1] + self.span, number))
        out = [softmax_attention(q[:, a:b], k[:, n], v[:, n], self.text_bias[:, n]) for a, b, n in bounds]
        return torch.cat(out, 1)


def teacher_forced(weights: Mapping[str, Tensor], layout: Layout, clean: Tensor, noisy: Tensor, sigma: Tensor,
                   text: Tensor, text_bias: Tensor) -> Tensor:
    """Velocity of the noisy blocks [B, C, 3*n, 16, 16].

    clean [B, C, 1+3*(blocks-1), 16, 16], noisy [B, C, 3*n, 16, 16] for the n denoised blocks, sigma [B, n],
    text [B, blocks, L, 4096] with bias [B, blocks, L].
    """
    plan = TeacherForced(layout, text_bias, noisy.dtype)
    t = torch.cat((sigma.new_zeros(len(sigma), layout.clean_frames), sigma.repeat_interleave(BLOCK, 1) * 1000), 1)
    v = wan_plain.wan_forward(weights, torch.cat((clean, noisy), 2), t, text.flatten(1, 2), num_heads=HEADS,
                              attend=plan.attend, cross=plan.cross)
    return v[:, :, layout.clean_frames:]


def velocity_loss(v: Tensor, noise: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """Mean squared velocity error per block, weighted; v, noise, target [B, C, 3*n, h, w], weight [B, n]."""
    error = F.mse_loss(v.float(), noise - target, reduction="none").unflatten(2, (-1, BLOCK)).mean((1, 3, 4, 5))
    return (error * weight).sum() / weight.sum().clamp_min(1)
