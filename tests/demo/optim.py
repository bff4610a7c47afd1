"""Muon for the hidden matrices and AdamW for everything else, with averaged weights; all state can be saved."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def orthogonalize(matrices: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly, of a stack [N, rows, columns] (five Newton-Schulz steps, bf16)."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT.contiguous() if tall else x
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(5):
        gram = torch.bmm(x, x.mT.contiguous())
        x = 3.4445 * x + torch.bmm(-4.7750 * gram + 2.0315 * torch.bmm(gram, gram), x)
    return (x.mT if tall else x).float()


class Optimizer:
    """One optimiser over named tensors; `rates` maps a name to the factor of its learning rate."""

    def __init__(self, params: dict[str, Tensor], muon: set[str], rates: Mapping[str, float]) -> None:
        self.params, self.rates = params, rates
        self.muon = sorted(muon)
        self.groups: dict[tuple[int, ...], list[str]] = {}
        for name in self.muon:
            self.groups.setdefault(tuple(params[name].shape), []).append(name)
        self.state = {
            name: {"m": torch.zeros_like(p), **({} if name in muon else {"v": torch.zeros_like(p)})} for name, p in params.items()
        }
        self.average = {name: p.detach().clone() for name, p in params.items()}
        self.steps = 0

    @torch.no_grad()
    def step(self, matrix_rate: float, rate: float, decay: float = 0.998) -> None:
        """Apply the gradients and clear them; matrix_rate is for Muon, rate for AdamW."""
        self.steps += 1
        for names in self.groups.values():
            self._muon(names, matrix_rate)
        for name, p in self.params.items():
            if "v" in self.state[name] and p.grad is not None:
                self._adam(name, p, rate * self.rates.get(name, 1.0))
            p.grad = None
        decay = min(decay, (1 + self.steps) / (20 + self.steps))
        for name, p in self.params.items():
            self.average[name].lerp_(p, 1 - decay)

    def _muon(self, names: list[str], rate: float) -> None:
        ready = [name for name in names if self.params[name].grad is not None]
        if not ready:
            return
        updates = []
        for name in ready:
            moment = self.state[name]["m"]
            moment.lerp_(self.params[name].grad, 0.05)
            updates.append(self.params[name].grad.lerp(moment, 0.95))
        rows, columns = updates[0].shape
        for name, update in zip(ready, orthogonalize(torch.stack(updates)), strict=True):
            self.params[name].mul_(1 - rate * 0.01).add_(update, alpha=-rate * max(1.0, rows / columns) ** 0.5)

    def _adam(self, name: str, p: Tensor, rate: float) -> None:
        moment, square = self.state[name]["m"], self.state[name]["v"]
        moment.lerp_(p.grad, 0.1)
        square.lerp_(p.grad * p.grad, 0.02)
        correct = math.sqrt(1 - 0.98**self.steps) / (1 - 0.9**self.steps)
        p.addcdiv_(moment, square.sqrt().add_(1e-8), value=-rate * correct)

    def state_dict(self) -> dict[str, object]:
        return {"state": self.state, "average": self.average, "steps": self.steps}

    def load_state_dict(self, saved: Mapping[str, object]) -> None:
        self.steps = int(saved["steps"])  # type: ignore[call-overload]
        for name in self.params:
            self.average[name].copy_(saved["average"][name])  # type: ignore[index]
            for key, value in self.state[name].items():
                value.copy_(saved["state"][name][key])  # type: ignore[index]
