"""Softmax attention through torch's fused kernels, never with a score matrix of unbounded size."""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..knobs import score_bytes

SCORE_ELEMENT_BYTES = 4
MIN_ROWS = 128  # fewer rows per chunk starve the matrix units: take fewer heads at a time instead
Pair = tuple[torch.Tensor, torch.Tensor | None]


def softmax_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, want_lse: bool
) -> Pair:
    """(out [B, H, n, D], natural-log sum float32 [B, H, n] or None) of q [B, H, n, D], k and v [B, H, m, D].

    bias float32 [B|1, H|1, m]. Rows whose keys are all hidden give 0 and -inf; torch's kernels differ there, so it is set here.
    """
    if q.numel() == 0 or k.shape[2] == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32) if want_lse else None
    if q.device.type == "cpu":
        out, lse = _on_cpu(q, k, v, bias, want_lse)
    else:
        out, lse = _in_chunks(q, k, v, bias, want_lse)
    if bias is not None:
        seen = (bias > -torch.inf).any(-1)[..., None]
        if seen.device.type == "cpu" and bool(seen.all()):
            return out, lse
        out = torch.where(seen[..., None], out, 0)
        lse = torch.where(seen, lse, -torch.inf) if lse is not None else None
    return out, lse


def _on_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, want_lse: bool) -> Pair:
    """The CPU's flash kernel: no score matrix, takes a float32 mask beside bf16 tensors, and has the log sum to give."""
    mask = None if bias is None else bias.to(torch.promote_types(q.dtype, torch.float32))[:, :, None, :]
    flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if not want_lse:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask), None
    if flash is None:
        return _in_chunks(q, k, v, bias, want_lse)
    if mask is not None:
        mask = mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    out, lse = flash(q, k, v, 0.0, False, attn_mask=mask)
    return out, lse.float()


def _in_chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, want_lse: bool) -> Pair:
    """Heads and query rows in chunks whose score matrix stays below the knob, should the device build one."""
    batch, heads, rows, _ = q.shape
    per_row = batch * k.shape[2] * SCORE_ELEMENT_BYTES
    room = max(1, score_bytes() // per_row)
    head_step = max(1, min(heads, room // min(rows, MIN_ROWS)))
    row_step = max(1, room // head_step)
    run = _explicit if want_lse else _plain
    outs, lses = [], []
    for h in range(0, heads, head_step):
        part = slice(h, h + head_step)
        mine = bias if bias is None or bias.shape[1] == 1 else bias[:, part]
        pieces = [run(piece, k[:, part], v[:, part], mine) for piece in q[:, part].split(row_step, dim=2)]
        outs.append(torch.cat([out for out, _ in pieces], dim=2))
        lses += [torch.cat([lse for _, lse in pieces if lse is not None], dim=2)] if want_lse else []
    return torch.cat(outs, dim=1), torch.cat(lses, dim=1) if want_lse else None


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> Pair:
    """GPU kernels want the mask in q's dtype: with bf16 the bias is rounded (error 6e-3 at counts of 750, 2e-3 below 8)."""
    if bias is None:
        return scaled_dot_product_attention(q, k, v), None
    mask = bias.to(q.dtype)[:, :, None, :].expand(q.shape[0], q.shape[1], q.shape[2], -1)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask), None


def _explicit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None) -> Pair:
    kind = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(kind) @ k.to(kind).transpose(-1, -2) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias[:, :, None, :]
    lse = torch.logsumexp(scores, -1)
    out = torch.exp(scores - torch.where(lse.isinf(), 0, lse)[..., None]) @ v.to(kind)
    return out.to(q.dtype), lse.float()
