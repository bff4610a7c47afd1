"""Which prompt tokens a latent frame needs: those that share a code with some of its queries, or that hold most of its attention."""

from __future__ import annotations

import torch

from ...kernels import registry
from ..annsa.buckets import every
from .settings import AnnCASettings

TINY = 1e-12
SAMPLED_QUERIES = 256


def _codes(x: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 [G, N, D] holding integers: x scaled per row to ``bits``-bit codes. The scale of a query does not change its ranking,
    that of a key does, so it is multiplied back into the keys' codes."""
    top = 2 ** (bits - 1) - 1
    scale = x.abs().amax(-1, keepdim=True).clamp_min(TINY) / top
    return (x / scale).round() * scale


def _best(q: torch.Tensor, k: torch.Tensor, valid: torch.Tensor, settings: AnnCASettings) -> torch.Tensor:
    """bool [G, M]: is the token among the ``probes`` best of some query? q [G, N, D], k [G, M, D], valid [G, M]."""
    score = torch.bmm(_codes(q, settings.bits), _codes(k, settings.bits).transpose(1, 2)).masked_fill(~valid[:, None], -torch.inf)
    found = score.topk(min(settings.probes, k.shape[1]), dim=-1).indices.flatten(1)
    return torch.zeros_like(valid).scatter(1, found, True) & valid


def _covering(q: torch.Tensor, k: torch.Tensor, real: torch.Tensor, log_count: torch.Tensor | None,
              settings: AnnCASettings) -> torch.Tensor:
    """bool [G, M]: the fewest tokens that together hold ``coverage`` of the attention mass of the ``real`` ones [G, M], by codes.

    q [G, N, H, D], k [G, M, H, D], log_count [G, M] of the rows behind each. Mass is the mean over heads and up to SAMPLED_QUERIES
    queries.
    """
    if settings.coverage >= 1:
        return real
    some = q[:, every(q.shape[1], SAMPLED_QUERIES, q.device)]
    codes = [_codes(x.float().transpose(1, 2), settings.bits) for x in (some, k)]
    scores = codes[0] @ codes[1].transpose(-1, -2) * q.shape[-1] ** -0.5
    if log_count is not None:
        scores = scores + log_count[:, None, None]
    mass = scores.masked_fill(~real[:, None, None], -torch.inf).softmax(-1).nan_to_num(0).mean((1, 2))
    ranked, order = mass.sort(dim=-1, descending=True, stable=True)
    needed = ranked.cumsum(-1) - ranked < settings.coverage  # the token that reaches it counts
    return torch.zeros_like(real).scatter(1, order, needed) & real


def _hashed(q: torch.Tensor, k: torch.Tensor, valid: torch.Tensor, settings: AnnCASettings, backend: str) -> torch.Tensor:
    """bool [G, M]: does some query share the token's sign hash in one of the tables?"""
    generator = torch.Generator().manual_seed(settings.seed)
    planes = torch.randn(settings.tables, q.shape[2], settings.bits, generator=generator).to(q.device)
    weight = valid[..., None].float()
    mean_k = (k * weight).sum(1) / weight.sum(1).clamp_min(1)
    mean_q = q.mean(1)
    tables = []
    for table in planes:
        mine, theirs = (registry.call("hash_codes", backend, x[:, :, None], mean[:, None], table[None])
                        for x, mean in ((q, mean_q), (k, mean_k)))
        flips = [0, *(1 << bit for bit in range(min(settings.probes - 1, settings.bits)))]
        tables += [(mine, theirs ^ flip) for flip in flips]
    kept = registry.call("prompt_keep", backend, torch.stack([m for m, _ in tables]), torch.stack([t for _, t in tables]))
    return kept[:, 0] & valid


def keep_tokens(q: torch.Tensor, k: torch.Tensor, valid: torch.Tensor, always: torch.Tensor, settings: AnnCASettings,
                backend: str, padding: torch.Tensor | None = None, log_count: torch.Tensor | None = None) -> torch.Tensor:
    """bool [G, M]: tokens to keep. q [G, N, H, D] of one frame, k [G, M, H, D] of the prompt, valid, always and padding bool [G, M],
    log_count float32 [G, M] of equal rows that a token stands for.

    Never fewer than ``min_kept`` beside what is always kept: the tokens with the highest mean logit fill up.
    """
    def rule(some_q: torch.Tensor, some_k: torch.Tensor) -> torch.Tensor:
        if settings.keep == "quant":
            return _best(some_q, some_k, valid, settings)
        return _hashed(some_q, some_k, valid, settings, backend)

    flat_q, flat_k = q.float().flatten(2), k.float().flatten(2)
    if settings.keep == "mass":
        kept = _covering(q, k, valid if padding is None else valid & ~padding, log_count, settings)
    elif settings.per_head:
        heads = [rule(q[:, :, h].float(), k[:, :, h].float()) for h in range(q.shape[2])]
        kept = torch.stack(heads).any(0)
    else:
        kept = rule(flat_q, flat_k)
    score = torch.einsum("gd,gmd->gm", flat_q.mean(1), flat_k).masked_fill(~valid | always, -torch.inf)
    rank = score.masked_fill(kept & valid & ~always, torch.inf).argsort(dim=-1, descending=True).argsort(-1)
    return valid & (kept | always | (rank < settings.min_kept))
