"""Where all attention of a run passes: the host's own function for dense calls, ours for biased and for sparse ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..kernels import registry
from .key_rows import KeyRows

if TYPE_CHECKING:
    from .annsa import SparseAttention

DenseFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Attention:
    """Attention of one run.

    ``dense`` is the host's attention (whatever the user chose there), set around every model call by the host hook; without
    it, and whenever keys carry a bias, the kernel registry decides. ``sparse`` (AnnSA) is asked first when a policy says which
    keys are history. All tensors are [B, tokens, heads, head_dim].
    """

    def __init__(self, backend: str = "auto") -> None:
        self.backend = backend
        self.dense: DenseFn | None = None
        self.sparse: SparseAttention | None = None

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None = None,
               rows: KeyRows | None = None) -> torch.Tensor:
        """softmax(q k^T / sqrt(d) + bias) v; ``bias`` is float32 [B, heads, keys] or broadcastable, or None."""
        if rows is not None and self.sparse is not None:
            out = self.sparse.attend(q, k, v, bias, rows, self.attend)
            if out is not None:
                return out
        if bias is None and self.dense is not None:
            return self.dense(q, k, v)
        return registry.call("attend", self.backend, q, k, v, bias)
