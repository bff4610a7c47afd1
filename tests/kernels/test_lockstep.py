"""Whole rollouts of a tiny model on two back-ends: with the same decisions they agree to rounding, and with their own nearly always.

FASTAR_BACKEND forces every op of a run; decisions (hash bits, matches, kept keys) can be taken from one back-end for both.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from typing import Any

import pytest
import torch

from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.tempcache.settings import TempCacheSettings
from fastar_pack.kernels import knobs, registry
from tiny.plain_engine import PlainEngine
from tiny.weights import random_weights

pytestmark = pytest.mark.cpu

BACKEND = os.environ.get("FASTAR_KERNEL_BACKENDS", "torch_fast").split(",")[0]
DECIDING = ("hash_codes", "nearest", "nearest_candidates", "prompt_keep")
SIGMAS = (1.0, 0.8, 0.5)
BLOCK, FRAMES, SIZE = 1, 7, (6, 8)
NEEDED_DB = 60.0


def rollout(backend: str, monkeypatch: pytest.MonkeyPatch, decider: str | None) -> tuple[torch.Tensor, Counter[str]]:
    """(latents of all denoise calls, calls per op) of one rollout with merging; ``decider``: whose decisions count."""
    plain = registry.call
    used: Counter[str] = Counter()

    def call(op: str, requested: str, *args: Any, **kwargs: Any) -> Any:
        used[op] += 1
        return plain(op, decider if decider and op in DECIDING else requested, *args, **kwargs)

    settings = PolicySettings(
        kind="tempcache", sink_frames=1, tempcache=TempCacheSettings(budget_frames=4, recent_frames=1, search="exact")
    )
    generator = torch.Generator().manual_seed(9)
    text = torch.randn(1, 5, 32, generator=generator)
    weights = random_weights(128, 1, 128, 32, std=0.2, peak=2.0)
    engine = PlainEngine(weights, [text], 2, (1, 16, FRAMES, *SIZE), BLOCK, settings)
    kept = []
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(registry, "call", call)
        patch.setenv(knobs.BACKEND, backend)
        for start in range(0, FRAMES, BLOCK):
            noise = torch.randn(1, 16, BLOCK, *SIZE, generator=generator)
            x = noise
            for step, sigma in enumerate(SIGMAS):
                x0 = engine(x, _context("denoise", start, sigma, step))
                kept.append(x0)
                following = SIGMAS[step + 1] if step + 1 < len(SIGMAS) else 0.0
                x = (1 - following) * x0 + following * noise
            engine(x, _context("clean", start, 0.0, 0))
    engine.run.close()
    return torch.stack(kept), used


def _context(phase: str, start: int, sigma: float, step: int) -> FwdCtx:
    rows, cols = SIZE[0] // 2, SIZE[1] // 2
    return FwdCtx(phase, start, BLOCK, (sigma,) * BLOCK, (1000 * sigma,) * BLOCK, rows, cols, step, prompt_id=0)  # type: ignore[arg-type]


def decibels(got: torch.Tensor, want: torch.Tensor) -> float:
    """Peak signal to noise ratio; the peak is the range of the wanted values."""
    error = float((got - want).double().square().mean())
    return math.inf if error == 0 else 10 * math.log10(float(want.max() - want.min()) ** 2 / error)


def test_with_the_same_decisions_two_back_ends_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    one, used = rollout(BACKEND, monkeypatch, "torch_fast")
    other, _ = rollout("reference", monkeypatch, "torch_fast")
    assert used["nearest"] + used["nearest_candidates"] > 0, "nothing was matched, so nothing was decided"
    same = decibels(one, other)
    print(f"{BACKEND} against reference: {same:.1f} dB with the same decisions; ops {dict(used)}")
    assert same > NEEDED_DB


def test_a_back_end_that_leaves_out_the_bias_is_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound would notice: attention without the log counts."""
    from fastar_pack.kernels.torch_fast import attend as module

    right, _ = rollout("reference", monkeypatch, "torch_fast")
    attend = module.attend
    monkeypatch.setattr(module, "attend", lambda q, k, v, bias=None, *rest, **options: attend(q, k, v, None, *rest, **options))
    wrong, _ = rollout("torch_fast", monkeypatch, "torch_fast")
    assert decibels(wrong, right) < NEEDED_DB
