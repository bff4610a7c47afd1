"""What sparse attention did in a run: which (sigma, layer) pairs, how many query-key pairs, why other calls stayed dense, recall."""

from __future__ import annotations

from collections import Counter, defaultdict

import torch


class Tally:
    """Counts of one run; what lives on the device is read when the report is written."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.ran: set[tuple[float, int]] = set()
        self._pairs: list[torch.Tensor] = []
        self._all = self._floor = self._dense = 0
        self._recall: dict[int, list[torch.Tensor]] = defaultdict(list)

    def dense(self, reason: str, pairs: int) -> None:
        """A denoise call that stayed dense."""
        self.reasons[f"dense: {reason}"] += 1
        self._dense += pairs

    def sparse(self, sigma: float, layer: int, visited: torch.Tensor, floor: int, pairs: int) -> None:
        """A sparse call: ``visited`` query-key pairs (scalar on the device) of ``pairs``, of which ``floor`` are always visible."""
        self.reasons["sparse"] += 1
        self.ran.add((sigma, layer))
        self._pairs.append(visited.double())
        self._all += pairs
        self._floor += floor

    def recall(self, layer: int, value: torch.Tensor) -> None:
        """Mean attention mass [H] that a call of the layer keeps."""
        self._recall[layer].append(value.float().mean())

    def layer_recall(self) -> dict[int, float]:
        return {layer: float(torch.stack(values).mean()) for layer, values in sorted(self._recall.items())}

    def density(self) -> float | None:
        """Visited over all pairs of the sparse calls."""
        return float(torch.stack(self._pairs).sum()) / self._all if self._all else None

    def report(self, target: float) -> dict[str, object]:
        """Plain data for the run report."""
        found: dict[str, object] = {"calls": dict(self.reasons)}
        if self._all:
            visited = float(torch.stack(self._pairs).sum())
            found |= {"density": round(visited / self._all, 4), "density_floor": round(self._floor / self._all, 4),
                      "density_all_denoise_calls": round((visited + self._dense) / (self._all + self._dense), 4)}
        if self._recall:
            layers = self.layer_recall()
            found |= {"layer_recall": {k: round(v, 4) for k, v in layers.items()}, "keep_dense": layers_to_keep_dense(layers, target)}
        return found


def layers_to_keep_dense(recall: dict[int, float], target: float) -> list[int]:
    """The fewest layers, worst first, whose leaving lifts the mean recall of the others to ``target`` (all when none reaches it)."""
    order = sorted(recall, key=lambda layer: recall[layer])
    for count in range(len(order)):
        rest = [recall[layer] for layer in order[count:]]
        if sum(rest) / len(rest) >= target:
            return sorted(order[:count])
    return sorted(order)
