"""A plain functional Wan text-to-video forward over a native state dict: the oracle of tests and the model of the demo.

Attention is handed in from outside, so that a test (or the trainer) decides what a query sees and where it stands.
Works with Parameters (autograd), any floating dtype and any latent size; nothing is kept between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
EPS = 1e-6


def rope_axes(head_dim: int) -> tuple[int, int, int]:
    """Split of a head over (frame, row, column): d - 4*(d//6), 2*(d//6), 2*(d//6)."""
    side = 2 * (head_dim // 6)
    return head_dim - 2 * side, side, side


def rope_table(positions: Tensor, head_dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """cos and sin [N, head_dim/2] in fp64 of integer `positions` [N, 3] = (frame, row, column)."""
    angles = []
    for axis, width in enumerate(rope_axes(head_dim)):
        power = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / width
        angles.append(positions[:, axis, None].double() / theta**power)
    angle = torch.cat(angles, dim=-1)
    return angle.cos(), angle.sin()


def rope_apply(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the interleaved pairs of x [B, N, H, d] by tables [N, d/2]; the result has the dtype of x."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[None, :, None], sin[None, :, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


def rope_rotate(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotate x [B, N, H, d] to integer positions [N, 3]; angles in fp64, products in at least fp32."""
    cos, sin = rope_table(positions, x.shape[-1], theta)
    work = torch.promote_types(x.dtype, torch.float32)
    return rope_apply(x.to(work), cos.to(work), sin.to(work)).to(x.dtype)


def grid_positions(frames: int, rows: int, columns: int, start: int = 0) -> Tensor:
    """Integer positions [frames*rows*columns, 3] of a block whose first latent frame is number `start`."""
    axes = (torch.arange(start, start + frames), torch.arange(rows), torch.arange(columns))
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 2)


def dense_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Unmasked softmax attention; q [B, N, H, d], k and v [B, M, H, d] -> [B, N, H, d]."""
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2)


def _linear(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[name + ".weight"], w[name + ".bias"])


def _norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=EPS)


def _heads(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1))


def _attention(
    w: Mapping[str, Tensor], name: str, layer: int, x: Tensor, source: Tensor, num_heads: int, attend: Attend
) -> Tensor:
    q = F.rms_norm(_linear(w, name + ".q", x), x.shape[-1:], w[name + ".norm_q.weight"], EPS)
    k = F.rms_norm(_linear(w, name + ".k", source), x.shape[-1:], w[name + ".norm_k.weight"], EPS)
    v = _linear(w, name + ".v", source)
    out = attend(layer, _heads(q, num_heads), _heads(k, num_heads), _heads(v, num_heads))
    return _linear(w, name + ".o", out.flatten(-2))


def sinusoid(t: Tensor, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Timestep features [..., width], cosines first."""
    power = torch.arange(width // 2, dtype=dtype, device=t.device) / (width // 2)
    angle = t.to(dtype).unsqueeze(-1) * torch.pow(10000.0, -power)
    return torch.cat((angle.cos(), angle.sin()), dim=-1)


def layer_count(weights: Mapping[str, Tensor]) -> int:
    """Number of transformer blocks in a native state dict."""
    return 1 + max(int(key.split(".")[1]) for key in weights if key.startswith("blocks."))


def _patch(w: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """x [B, C, F, h, w] -> tokens [B, F*rows*columns, dim] and the token grid; odd sizes wrap around as in the host."""
    pad_h, pad_w = x.shape[-2] % 2, x.shape[-1] % 2
    if pad_h or pad_w:
        x = F.pad(x, (0, pad_w, 0, pad_h, 0, 0), mode="circular")
    b, c, f, h, wd = x.shape
    patches = x.reshape(b, c, f, h // 2, 2, wd // 2, 2).permute(0, 2, 3, 5, 1, 4, 6).flatten(4)
    tokens = F.linear(patches, w["patch_embedding.weight"].flatten(1), w["patch_embedding.bias"])
    return tokens.flatten(1, 3), (f, h // 2, wd // 2)


def _unpatch(tokens: Tensor, grid: tuple[int, int, int], height: int, width: int) -> Tensor:
    f, rows, cols = grid
    pixels = tokens.unflatten(1, grid).unflatten(-1, (2, 2, -1))
    out = pixels.permute(0, 6, 1, 2, 4, 3, 5).reshape(tokens.shape[0], -1, f, rows * 2, cols * 2)
    return out[..., :height, :width]


def embed_time(weights: Mapping[str, Tensor], t: Tensor, sinusoid_dtype: torch.dtype = torch.float32) -> Tensor:
    """t [B, F] in 0..1000 -> e [B, F, dim]."""
    width = weights["time_embedding.0.weight"].shape[1]
    features = sinusoid(t, width, sinusoid_dtype).to(weights["time_embedding.0.weight"].dtype)
    return _linear(weights, "time_embedding.2", F.silu(_linear(weights, "time_embedding.0", features)))


def embed_text(weights: Mapping[str, Tensor], context: Tensor) -> Tensor:
    """Text rows [B, L, text_dim] -> [B, L, dim], as every cross-attention reads them."""
    return _linear(
        weights, "text_embedding.2", F.gelu(_linear(weights, "text_embedding.0", context), approximate="tanh")
    )


def wan_block(
    w: Mapping[str, Tensor],
    layer: int,
    x: Tensor,
    e6: Tensor,
    text: Tensor,
    num_heads: int,
    attend: Attend,
    cross: Attend,
) -> Tensor:
    """One transformer block; x [B, F*S, dim], e6 [B, F, 6, dim], text [B, L, dim]."""
    name = f"blocks.{layer}"
    frames = e6.shape[1]
    shift1, scale1, gate1, shift2, scale2, gate2 = (w[name + ".modulation"][:, None] + e6).unsqueeze(3).unbind(2)

    def modulated(value: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return torch.addcmul(shift, _norm(value).unflatten(1, (frames, -1)), 1 + scale).flatten(1, 2)

    def gated(value: Tensor, gate: Tensor) -> Tensor:
        return (value.unflatten(1, (frames, -1)) * gate).flatten(1, 2)

    y = modulated(x, shift1, scale1)
    x = x + gated(_attention(w, name + ".self_attn", layer, y, y, num_heads, attend), gate1)
    y = F.layer_norm(x, x.shape[-1:], w[name + ".norm3.weight"], w[name + ".norm3.bias"], EPS)
    x = x + _attention(w, name + ".cross_attn", layer, y, text, num_heads, cross)
    y = F.gelu(_linear(w, name + ".ffn.0", modulated(x, shift2, scale2)), approximate="tanh")
    return x + gated(_linear(w, name + ".ffn.2", y), gate2)


def wan_forward(
    weights: Mapping[str, Tensor],
    x: Tensor,
    t: Tensor,
    context: Tensor,
    *,
    num_heads: int,
    attend: Attend,
    cross: Attend | None = None,
    sinusoid_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Velocity [B, C_out, F, h, w] of latents x [B, C, F, h, w] at timesteps t [B, F] (0..1000).

    context: text rows [B, L, text_dim], all attended. attend(layer, q, k, v) and cross(layer, q, k, v) take
    [B, tokens, heads, head_dim]; q and k come after the full-width RMSNorm and before RoPE: rotating is attend's task.
    """
    cross = cross or dense_attention
    tokens, grid = _patch(weights, x)
    e = embed_time(weights, t, sinusoid_dtype)
    e6 = _linear(weights, "time_projection.1", F.silu(e)).unflatten(-1, (6, -1))
    text = embed_text(weights, context)
    for layer in range(layer_count(weights)):
        tokens = wan_block(weights, layer, tokens, e6, text, num_heads, attend, cross)
    shift, scale = (weights["head.modulation"][:, None] + e.unsqueeze(2)).unsqueeze(3).unbind(2)
    out = torch.addcmul(shift, _norm(tokens).unflatten(1, (grid[0], -1)), 1 + scale).flatten(1, 2)
    return _unpatch(_linear(weights, "head.head", out), grid, x.shape[-2], x.shape[-1])
