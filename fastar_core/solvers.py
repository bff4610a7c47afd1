"""How a block gets from one noise level to the next.

Few-step distilled models re-noise their own x0; multi-step teachers integrate the flow with UniPC (order 2, bh2), a predictor
whose result is corrected with the model output of the step it predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from .noise import RenoiseSource
from .sigmas import TRAIN_STEPS, SigmaSchedule


class Solver(Protocol):
    """Steps of one block; a fresh object per block."""

    def corrected(self, x: torch.Tensor, x0: torch.Tensor, step: int) -> torch.Tensor:
        """x of ``step``, improved by the model output x0 that was made from it."""
        ...

    def advance(self, x: torch.Tensor, x0: torch.Tensor, step: int) -> torch.Tensor:
        """The input of step + 1; after the last step the result of the block."""
        ...


class RenoiseSolver:
    """x = (1 - s) x0 + s e with fresh noise e at the next sigma s; the result is the last x0."""

    def __init__(self, sigmas: Sequence[float], renoise: RenoiseSource, block: int) -> None:
        self.sigmas = sigmas
        self.renoise = renoise
        self.block = block

    def corrected(self, x: torch.Tensor, x0: torch.Tensor, step: int) -> torch.Tensor:
        return x

    def advance(self, x: torch.Tensor, x0: torch.Tensor, step: int) -> torch.Tensor:
        if step + 1 == len(self.sigmas):
            return x0
        following = self.sigmas[step + 1]
        return (1.0 - following) * x0 + following * self.renoise(self.block, step, x0)


def _log_snr(sigma: float) -> float:
    """log(alpha / sigma) of the flow x = (1 - sigma) x0 + sigma noise."""
    if sigma <= 0:
        return math.inf
    return -math.inf if sigma >= 1 else math.log1p(-sigma) - math.log(sigma)


def _moments(h: float, order: int) -> tuple[float, list[float]]:
    """h phi_1(-h) and the factors b_1 .. b_order of the bh2 family, for data prediction (h > 0)."""
    first = math.expm1(-h)
    phi, factorial, moments = first / -h - 1, 1, []
    for i in range(1, order + 1):
        moments.append(phi * factorial / first)
        factorial *= i + 1
        phi = phi / -h - 1 / factorial
    return first, moments


class UniPCSolver:
    """UniPC of order 2 in data prediction; the first and the last step are of order 1.

    ``sigmas`` are those of the steps, a final 0 is implied.
    """

    def __init__(self, sigmas: Sequence[float]) -> None:
        self.sigmas = [*sigmas, 0.0]
        self.outputs: list[torch.Tensor] = []
        self._before: torch.Tensor | None = None

    def _step(self, x: torch.Tensor, step: int, new: torch.Tensor | None, order: int) -> torch.Tensor:
        """From ``step`` to step + 1. ``new`` is the model output at the target: given for the corrector only."""
        current, following = self.sigmas[step], self.sigmas[step + 1]
        h = _log_snr(following) - _log_snr(current)
        last = self.outputs[-1]
        ratio = following / current
        if math.isinf(h):
            return ratio * x + (1 - following) * last if following > 0 or current >= 1 else last
        first, moments = _moments(h, 2)
        out = ratio * x - (1 - following) * first * last
        nodes = [(_log_snr(self.sigmas[step - 1]) - _log_snr(current)) / h] if order == 2 and step > 0 else []
        nodes = [node for node in nodes if math.isfinite(node)]
        slopes = [(self.outputs[-2] - last) / node for node in nodes]
        if new is not None:
            nodes, slopes = [*nodes, 1.0], [*slopes, new - last]
        weights = _solve(nodes, moments)
        for weight, slope in zip(weights, slopes):
            out = out - (1 - following) * first * weight * slope
        return out

    def corrected(self, x: torch.Tensor, x0: torch.Tensor, step: int) -> torch.Tensor:
        if step > 0 and self._before is not None:
            x = self._step(self._before, step - 1, x0, 2 if len(self.outputs) > 1 else 1)
        return x

    def advance(self, x: torch.Tensor, x0: torch.Tensor, step: int) -> torch.Tensor:
        self.outputs = [*self.outputs[-1:], x0]
        self._before = x
        last_step = step + 2 == len(self.sigmas)
        return self._step(x, step, None, 1 if last_step or step == 0 else 2)


def _solve(nodes: list[float], moments: list[float]) -> list[float]:
    """Weights rho with sum_k rho_k node_k^(i-1) = b_i; the single-node predictor and corrector of order 2 use 1/2 as published."""
    if len(nodes) == 1:
        return [0.5]
    if not nodes:
        return []
    (a, b), (m1, m2) = nodes, moments
    second = (m2 - a * m1) / (b - a)
    return [m1 - second, second]


def teacher_schedule(num_steps: int, shift: float) -> SigmaSchedule:
    """Sigmas of the multi-step teachers: evenly spaced from 0.999, shifted; the model is told whole timesteps."""
    uniform = [(1 - 1 / TRAIN_STEPS) * (1 - i / num_steps) for i in range(num_steps)]
    sigmas = tuple(shift * u / (1 + (shift - 1) * u) for u in uniform)
    return SigmaSchedule(sigmas, timesteps=tuple(float(int(s * TRAIN_STEPS)) for s in sigmas))
