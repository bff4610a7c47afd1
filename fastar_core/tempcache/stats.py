"""What a run did, per block and layer, as plain data for reports and plots. Collected on the device, read once at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..context import FwdCtx
from .ledger import Move

if TYPE_CHECKING:
    from .store import LayerStore

COLUMNS = ("groups", "merged", "opened", "evicted", "folded", "step_recall")


class TempCacheStats:
    """One entry per committed block: occupied rows, tokens merged, groups opened and evicted, step recall of every layer."""

    def __init__(self) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._values: list[torch.Tensor] = []

    def add(self, ctx: FwdCtx, stores: Mapping[int, Sequence[tuple[object, LayerStore]]], move: Move) -> None:
        """After a commit: reads nothing from the device. Layers without any history are left out of the lists."""
        with_history = {layer: store for layer, parts in stores.items() for _, store in parts if store.pool is not None}
        tokens = ctx.tokens_per_frame
        pinned, own = len(move.after) * tokens, ctx.num_frames * tokens
        parts = [(store.keys.shape[1], pinned + store.bound) for listed in stores.values() for _, store in listed]
        heads = max(1, sum(count for count, _ in parts))
        executed = sum(count * (rows + own) for count, rows in parts) / heads
        self._blocks.append({"start": ctx.start, "frames": ctx.num_frames, "left_recent": len(move.leaving),
                             "layers": list(with_history), "rows": [pinned + store.bound for store in with_history.values()],
                             "density": executed / (ctx.end * tokens + own),
                             "bytes": sum(store.bytes() for listed in stores.values() for _, store in listed)})
        rows = [self._row(store) for store in with_history.values()]
        self._values.append(torch.stack(rows) if rows else torch.zeros(0, len(COLUMNS)))

    def _row(self, store: LayerStore) -> torch.Tensor:
        """[columns] of one layer; NaN where recall was not measured."""
        assert store.pool is not None
        recall = store.recall if store.recall is not None else torch.full((), float("nan"), device=store.keys.device)
        used = (store.pool.count > 0).float().sum(-1).mean()
        row = torch.cat([used[None], store.tally.float(), recall[None]])
        store.recall = None
        store.tally = torch.zeros_like(store.tally)
        return row

    def drop_last(self) -> None:
        """The last block was rolled back."""
        del self._blocks[-1:], self._values[-1:]

    def report(self) -> dict[str, Any]:
        """{"blocks": [...]}: one entry per block, in it lists over ``layers``.

        start, frames: latent frames of the block; left_recent: frames that entered the history with it; rows: key rows a head
        sees of what is stored; groups: occupied history rows (mean over batch rows and groups of heads); merged, opened, evicted:
        tokens and rows, summed over batch rows and groups of heads; step_recall: attention mass the block's compaction left in
        place; density: key rows seen by the next block of the same size over those of a cache that keeps everything.
        """
        blocks = []
        for block, values in zip(self._blocks, self._values):
            columns = values.T.tolist()
            listed = {name: [None if v != v else v for v in column] for name, column in zip(COLUMNS, columns)}
            blocks.append({**block, **listed})
        return {"blocks": blocks}
