"""The one object that owns everything a run keeps: created by the sampler, closed in its ``finally``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from .annca import AnnCASettings, PromptPruner
from .annsa import AnnSASettings, SparseAttention
from .attention import Attention
from .context import FwdCtx
from .errors import FastARError
from .geometry import RunGeometry
from .policies import CachePolicy, PolicySettings, make_policy
from .positions import RopeSpec


class RunState:
    """Cache policies per branch, the attention of the run, and counts of what was handled.

    ``schedule``: sigmas of the run; AnnCA (``prompts``) and AnnSA (``sparse``) need it to know which steps they may act in.
    """

    def __init__(self, settings: PolicySettings, geometry: RunGeometry, rope: RopeSpec, backend: str = "auto",
                 schedule: Sequence[float] = (), annca: AnnCASettings | None = None, annsa: AnnSASettings | None = None) -> None:
        self.settings = settings
        self.geometry = geometry
        self.rope = rope
        self.attention = Attention(backend)
        self.sparse = self.attention.sparse = None if annsa is None else SparseAttention(annsa, schedule, backend)
        self.prompts = None if annca is None else PromptPruner(annca, self.attention, schedule)
        self.counters: Counter[str] = Counter()
        self.ctx: FwdCtx | None = None
        self.peak_bytes = 0
        self._policies: dict[Hashable, CachePolicy] = {}
        self._begun: set[Hashable] = set()
        self._on_close: list[Callable[[], None]] = []

    def policy(self, branch: Hashable) -> CachePolicy:
        """The policy of a branch, planned for the current call on first use in it."""
        if self.ctx is None:
            raise FastARError("the model was called outside a block of the FAST-AR driver")
        if branch not in self._policies:
            self._policies[branch] = make_policy(self.settings, self.geometry, self.rope, self.attention)
        policy = self._policies[branch]
        if branch not in self._begun:
            policy.begin(self.ctx)
            self._begun.add(branch)
        return policy

    def adopt(self, branch: Hashable, policy: CachePolicy) -> CachePolicy:
        """Takes a policy that was made and filled elsewhere as that of ``branch``; it is closed with the run."""
        self._policies[branch] = policy
        return policy

    def begin(self, ctx: FwdCtx) -> None:
        """Announces the next model call."""
        self.ctx = ctx
        self._begun.clear()
        if self.sparse is not None:
            self.sparse.start_call((ctx.block, ctx.start), ctx.commits)

    def end(self) -> None:
        """After the model call: commits the branches that took part, when the phase commits. Raises when none did."""
        ctx = self.ctx
        if ctx is None:
            raise FastARError("end() without begin()")
        if not self._begun:
            raise FastARError(f"the {ctx.phase} call over latent frames {ctx.start}..{ctx.end - 1} never reached FAST-AR's "
                              "attention: another node replaced it. Put the FAST-AR node after that node")
        self.peak_bytes = max(self.peak_bytes, self.bytes())
        if ctx.commits:
            for branch in self._begun:
                self._policies[branch].commit(ctx)
        self.counters[ctx.phase] += 1
        self.peak_bytes = max(self.peak_bytes, self.bytes())
        self.ctx = None

    def bytes(self) -> int:
        """Bytes held by all branches."""
        return sum(p.bytes() for p in self._policies.values()) + (0 if self.sparse is None else self.sparse.bytes())

    def on_close(self, action: Callable[[], None]) -> None:
        """Registers something to undo when the run ends, in whatever way it ends."""
        self._on_close.append(action)

    def report(self) -> dict[str, object]:
        """Counts for the run report: model calls per phase, branches, bytes."""
        told = {str(branch): found for branch, policy in self._policies.items() if (found := policy.report())}
        return {"model_calls": dict(self.counters), "branches": len(self._policies), "cache_bytes": self.bytes(),
                "cache_peak_bytes": self.peak_bytes, "policy": self.settings.kind, **({"cache": told} if told else {}),
                **{name: part.report() for name, part in (("annca", self.prompts), ("annsa", self.sparse)) if part is not None}}

    def close(self) -> None:
        """Frees every tensor of the run and undoes what was registered; may be called twice."""
        while self._on_close:
            self._on_close.pop()()
        for policy in self._policies.values():
            policy.reset()
        self._policies.clear()
        self._begun.clear()
        for part in (self.prompts, self.sparse):
            if part is not None:
                part.close()
        self.attention.dense = None
        self.ctx = None
