"""What "similar" means: keys are turned into feature vectors whose dot product, or distance, is the similarity.

paper: unit keys; the dot product is the cosine. logit: keys times the square root of the queries' second moment C, over sqrt(d);
the distance of two features is then the root mean square difference of their attention logits over the queries seen so far:
E[(q (k - k'))^2] / d = (k - k')^T C (k - k') / d. If every member's logit differs from its representative's by at most delta,
the output error is at most (e^(2 delta) - 1) sum_i w_i |v_i - o|.
"""

from __future__ import annotations

import torch

EPS = 1e-12


class QueryMoment:
    """Running mean of q q^T per head, [B, H, D, D] in float32, from clean passes; the queries are taken before RoPE."""

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.moment: torch.Tensor | None = None
        self._root: torch.Tensor | None = None

    def observe(self, q: torch.Tensor) -> torch.Tensor:
        """The moment after queries q [B, H, N, D]; nothing changes before take()."""
        q = q.float()
        new = q.transpose(-1, -2) @ q / q.shape[2]
        return new if self.moment is None else self.decay * self.moment + (1 - self.decay) * new

    def take(self, moment: torch.Tensor | None) -> None:
        """Makes ``moment`` the current one (None = nothing seen yet)."""
        self.moment, self._root = moment, None

    def root(self) -> torch.Tensor:
        """R with R R^T = moment, from the symmetric eigenvalue problem (rank deficiency is fine)."""
        assert self.moment is not None
        if self._root is None:
            values, vectors = torch.linalg.eigh(self.moment.double().cpu())
            root = vectors * values.clamp_min(0).sqrt()[..., None, :]
            self._root = root.float().to(self.moment.device)
        return self._root

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.moment, self._root) if t is not None]


def features(k: torch.Tensor, moment: QueryMoment | None, shared: bool) -> torch.Tensor:
    """Feature vectors [B, G, N, F] of keys [B, H, N, D]; shared: G = 1 and the heads side by side, scaled to a mean over heads."""
    heads, dim = k.shape[1], k.shape[-1]
    x = k.float()
    if moment is None:
        x = x / x.norm(dim=-1, keepdim=True).clamp_min(EPS)
    else:
        x = x @ moment.root() / dim**0.5
    if shared:
        x = x.transpose(1, 2).flatten(2)[:, None] / heads**0.5
    return x


def similarity(a: torch.Tensor, b: torch.Tensor, logit: bool) -> torch.Tensor:
    """Similarities [B, G, N, M] of features a [B, G, N, F] and b [B, G, M, F]: cosine, or 1 - distance."""
    dots = a @ b.transpose(-1, -2)
    if not logit:
        return dots
    squares = a.square().sum(-1)[..., :, None] + b.square().sum(-1)[..., None, :] - 2 * dots
    return 1 - squares.clamp_min(0).sqrt()
