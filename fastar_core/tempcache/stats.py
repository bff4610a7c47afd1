"""What a run did, per block and layer, as plain data for reports and plots. Collected on the device, read once at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..context import FwdCtx
from .ledger import Move

if TYPE_CHECKING:
    from .store import LayerStore

COLUMNS = ("groups", "merged", "opened", "evicted", "step_recall")


class TempCacheStats:
    """One entry per committed block: occupied rows, tokens merged, groups opened and evicted, step recall of every layer."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._values: list[torch.Tensor] = []

    def add(self, ctx: FwdCtx, stores: list[LayerStore], move: Move) -> None:
        """After a commit: reads nothing from the device."""
        tokens = ctx.tokens_per_frame
        seen = [len(move.after) * tokens + store.bound for store in stores]
        self._blocks.append({"start": ctx.start, "frames": ctx.num_frames, "left_recent": len(move.leaving),
                             "rows": seen, "density": sum(seen) / len(seen) / (ctx.end * tokens),
                             "bytes": sum(store.bytes() for store in stores)})
        nothing = torch.full((), float("nan"), device=stores[0].keys.device)
        rows = []
        for store in stores:
            recall = store.recall.value if store.recall.value is not None else nothing
            rows.append(torch.cat([torch.tensor([float(store.bound)], device=recall.device), store.tally.float(), recall[None]]))
            store.recall.value = None
            store.tally.zero_()
        self._values.append(torch.stack(rows))

    def report(self) -> dict[str, Any]:
        """{"blocks": [{start, frames, rows, density, bytes, groups, merged, opened, evicted, step_recall (lists over layers)}]}."""
        blocks = []
        for block, values in zip(self._blocks, self._values):
            columns = values.T.tolist()
            listed = {name: [None if v != v else v for v in column] for name, column in zip(COLUMNS, columns)}
            blocks.append({**block, **listed})
        return {"blocks": blocks}
