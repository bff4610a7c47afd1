"""What can be chosen about TempCache, with units, defaults and the effect of raising each value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..errors import ConfigError

Similarity = Literal["paper", "logit"]
Search = Literal["int8", "exact", "lsh"]
Representative = Literal["mean", "last", "medoid"]
Space = Literal["post", "pre"]
HistoryType = Literal["same", "int8"]
FAMILY_SINK = -1  # of PolicySettings.sink_frames: as the family has it, at least 1
FAMILY_SPAN = 0  # of reindex_span: what the family was trained on
FAMILY_CONTEXT = -1  # of carry_frames: the context frames of the family's restarts
AUTO_MEMORY = -1  # of memory_gb: what the host can give


@dataclass(frozen=True)
class TempCacheSettings:
    """Settings of the history pool. All frame counts are latent frames.

    budget_frames: rows of the cache in latent frames, sink, recent range and history included (own block apart). More remembers
        more and costs time and memory in proportion.
    recent_frames: newest committed frames that stay as they are; a token is matched when its frame leaves this range. 0 merges at
        the clean pass ("at once", the paper's rule).
    space: "post" = keys are compared and averaged where they stand, after RoPE at their true positions. A query's logit is linear
        in the rotated key, so the mean of rotated keys gives each group's mean logit at every distance; measured history recall
        .95 against .53 for "pre". "pre" = before RoPE (the paper's reading); the group then stands where its newest token stood.
    similarity: "paper" = cosine of keys; "logit" = root mean square difference of the attention logit under the running second
        moment of the queries.
    threshold: a token joins a group at or above this similarity (paper: cosine; logit: 1 - rms logit difference). Higher keeps
        more distinct rows. 1.01 switches merging off.
    floor: once the pool is full, the best matching tokens join down to this similarity; below it the least used rows go.
    regroup: in a full pool, groups that are nearly alike join when that costs less than forcing a new token into a poor match.
        Remembers more, and fits the merging to each head: the closest pairs go first, wherever the threshold stands.
    bias_correction: largest measured correction of a group's log count (natural log). A mean key gets less attention than its
        members did; the queries of the clean pass say how much. 0 = the log count alone.
    representative: which key speaks for a group: the "mean", the "last" (the paper's choice) or the "medoid".
    search / bits / tables: how the match is found: by "int8" codes (the winner is then compared exactly), "exact", or "lsh" (sign
        hash of `bits`, best of `tables`).
    neighbourhood: tokens up to this many rows and columns away in the frame that left before are tried first. When several frames
        leave at once, groups that an earlier one of them opened are only met there; the first one needs it for "lsh" only.
    shared: heads of a layer share their groups (one decision by mean similarity); False decides per head.
    reindex_span: old positions are squeezed linearly into the last this many frames; None keeps true positions; FAMILY_SPAN is
        replaced by what the family was trained on before a run.
    memory_gb: the budget is lowered until the plan keeps this many GB; 0 = no limit; AUTO_MEMORY = what the host can give.
    history_type: "int8" stores merged rows in 8 bits with one scale per row.
    carry_frames: for families whose timeline starts over (Krea, CausVid): latent frames a new timeline begins with. The history is
        then kept over restarts, with what was pinned taken in; 0 forgets it, as the family's own code does.
    quiet_heads: (layer, head) pairs measured to look at the current frame only; they keep no history.
    usage_decay: weight of the past in a row's running usage. seed: of the queries that usage is measured with.
    """

    budget_frames: float = 21.0
    recent_frames: int = 3
    space: Space = "post"
    similarity: Similarity = "paper"
    threshold: float = 0.9
    floor: float = 0.3
    regroup: bool = True
    representative: Representative = "mean"
    bias_correction: float = 0.3
    search: Search = "int8"
    bits: int = 10
    tables: int = 4
    neighbourhood: int = 1
    shared: bool = True
    reindex_span: int | None = None
    history_type: HistoryType = "same"
    carry_frames: int = 0
    quiet_heads: tuple[tuple[int, int], ...] = ()
    usage_decay: float = 0.9
    seed: int = 0
    memory_gb: float = 0.0

    def __post_init__(self) -> None:
        for name, kind in (("space", Space), ("similarity", Similarity), ("search", Search), ("representative", Representative),
                           ("history_type", HistoryType)):
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(get_args(kind))}")
        if self.reindex_span is not None and self.reindex_span < 0:
            raise ConfigError(f"reindex_span is {self.reindex_span}; choose 1 or more latent frames, or None for true positions")
        if self.recent_frames < 0 or self.neighbourhood < 0:
            raise ConfigError(f"recent_frames {self.recent_frames} and neighbourhood {self.neighbourhood} must be 0 or more")
        if not 1 <= self.bits <= 31 or self.tables < 1:
            raise ConfigError(f"bits {self.bits} must be 1 to 31 and tables {self.tables} at least 1")
        if self.bias_correction < 0:
            raise ConfigError(f"bias_correction {self.bias_correction} must be at least 0")
        if not 0 <= self.usage_decay < 1:
            raise ConfigError(f"usage_decay {self.usage_decay} must be at least 0 and below 1")

    @property
    def folds(self) -> bool:
        """True when groups may join each other. Not for packed rows, which are only coded anew when they change."""
        return self.regroup and self.threshold <= 1 and self.representative == "mean" and self.history_type == "same"

    def __deepcopy__(self, memo: dict[int, Any]) -> TempCacheSettings:
        return self
