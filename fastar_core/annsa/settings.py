"""What can be chosen about AnnSA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import ConfigError

Buckets = Literal["kmeans", "sign", "shared"]
Balance = Literal["model", "layer"]
MAX_SIGN_BITS = 8


@dataclass(frozen=True)
class AnnSASettings:
    """Settings of sparse self-attention.

    density: query-key pairs visited in a sparse call over all pairs, always visible keys included. Higher is closer to dense and
        slower; 1 visits everything.
    buckets: how keys are grouped, after RoPE: warm-started "kmeans", "sign" hash, or "shared" with the text cross-attention (the
        paper's way). Attention mass kept on the demo model: `python tests/bench.py sparse`. Grouping before RoPE loses a quarter of
        it (.85 to .68).
    key_buckets: buckets of the keys (sign and shared: the next power of two). More follow the keys more closely and cost more ranges:
        mass kept at density .28 and 9000 keys .93 with 64, .95 with 128, .97 with 256.
    query_buckets: groups of queries that visit the same keys; 0 = 16, or 8 below 3000 queries on a GPU (there a group is padded to
        whole tiles). Sign and shared group queries by the keys' codes.
    balance: "model" spends the pairs where they catch most mass, over heads and layers alike; "layer" gives every layer the same.
    recent_frames: latent frames before the call that are always visible, beside the sink and the call's own.
    dense_share: the noisiest share of the schedule that stays dense, found by sigma.
    dense_layers: layers that stay dense. only_if_faster: a call stays dense unless sparse is predicted to be 10 % faster.
    calibrate: measure how much mass every layer would keep, computing densely; the report names the layers to keep dense for the
        others to reach ``target_recall``.
    """

    density: float = 0.28
    buckets: Buckets = "kmeans"
    key_buckets: int = 128
    query_buckets: int = 0
    balance: Balance = "model"
    recent_frames: int = 3
    dense_share: float = 0.3
    dense_layers: tuple[int, ...] = ()
    only_if_faster: bool = True
    calibrate: bool = False
    target_recall: float = 0.94
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind in (("buckets", Buckets), ("balance", Balance)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(get_args(kind))}")
        if not 0 < self.density <= 1:
            raise ConfigError(f"density is {self.density:g}; choose above 0 (few keys) up to 1 (all keys)")
        if self.key_buckets < 1 or self.query_buckets < 0 or self.recent_frames < 0:
            raise ConfigError(f"key_buckets {self.key_buckets} must be at least 1, query_buckets {self.query_buckets} and "
                              f"recent_frames {self.recent_frames} at least 0")
        if not 0 <= self.dense_share <= 1 or not 0 < self.target_recall <= 1:
            raise ConfigError(f"dense_share {self.dense_share:g} and target_recall {self.target_recall:g} must lie between 0 and 1")

    @property
    def bits(self) -> int:
        """Sign bits that give at least ``key_buckets`` buckets."""
        return max(1, min(MAX_SIGN_BITS, (self.key_buckets - 1).bit_length()))

    def queries_in(self, rows: int, device: str) -> int:
        """Query buckets for a call of ``rows`` queries."""
        wanted = self.query_buckets or (8 if device == "cuda" and rows < 3000 else 16)
        return max(1, min(wanted, rows))

    def __deepcopy__(self, memo: dict[int, Any]) -> AnnSASettings:
        return self
