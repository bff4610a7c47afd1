"""Which latent frames stand in which pinned slot: the sink first, then the ring of recent frames. The same for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..context import FwdCtx


@dataclass
class Move:
    """What a commit does to the slots: frames that leave in order of age, slots before and after, slots that change."""

    leaving: list[int]
    before: list[int]
    after: list[int]
    changed: list[int]


@dataclass
class Ledger:
    """``frames[slot]`` is the latent frame in a slot; ``first`` the frame the timeline begins with."""

    sink: int
    recent: int
    first: int = 0
    end: int = 0
    frames: list[int] = field(default_factory=list)

    @property
    def slots(self) -> int:
        return self.sink + self.recent

    def restart(self, first: int = 0) -> None:
        self.first = self.end = first
        self.frames = []

    def plan(self, ctx: FwdCtx) -> Move:
        """The move for committing a call whose frames follow the committed ones."""
        before = list(self.frames)
        after = list(self.frames)
        leaving = []
        newest = ctx.end - self.recent
        for frame in range(ctx.start, ctx.end):
            if len(after) < self.slots and (frame - self.first < self.sink or frame >= newest):
                after.append(frame)
            elif frame < newest:
                leaving.append(frame)
            else:
                old = min(range(self.sink, len(after)), key=after.__getitem__)
                leaving.append(after[old])
                after[old] = frame
        changed = [slot for slot, frame in enumerate(after) if ctx.start <= frame < ctx.end]
        return Move(sorted(leaving), before, after, changed)
