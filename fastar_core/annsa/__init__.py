"""AnnSA: self-attention that visits some buckets of the keys (design: 7)."""

from .settings import AnnSASettings
from .sparse import SparseAttention

__all__ = ["AnnSASettings", "SparseAttention"]
