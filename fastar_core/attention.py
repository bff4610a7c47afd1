"""The one caller of kernels: dense attention through the host's own function, biased attention through ours."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..kernels import registry

DenseFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Attention:
    """Attention of one run.

    ``dense`` is the host's attention (whatever the user chose there), set around every model call by the host hook; without
    it, and whenever keys carry a bias, the kernel registry decides. All tensors are [B, tokens, heads, head_dim].
    """

    def __init__(self, backend: str = "auto") -> None:
        self.backend = backend
        self.dense: DenseFn | None = None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """softmax(q k^T / sqrt(d) + bias) v; ``bias`` is float32 [B, heads, keys] or broadcastable, or None."""
        if bias is None and self.dense is not None:
            return self.dense(q, k, v)
        return registry.call("attend", self.backend, q, k, v, bias)
