"""`full` equals one uncached block-causal forward (golden invariant 1)."""

from __future__ import annotations

import pytest
import torch

from core.engine_tools import FULL, Rollout, uncached_velocity, window
from fastar_pack.fastar_core.geometry import plan_blocks, prefix_chunks, token_grid

pytestmark = pytest.mark.cpu
TOLERANCE = 1e-5


def units_of(rollout: Rollout) -> list[int]:
    """Block number of every latent frame: prefix chunks first, then the generated blocks."""
    total = rollout.shape[2]
    spans = prefix_chunks(rollout.prefix, rollout.block)
    spans += [(b.start, b.num_frames) for b in plan_blocks(total, rollout.block, rollout.prefix)]
    return [i for i, (_, count) in enumerate(spans) for _ in range(count)]


def worst_call(rollout: Rollout, units: list[int]) -> float:
    """Largest velocity difference between the cached calls and the uncached oracle."""
    clean = rollout.run()
    worst = 0.0
    for x, ctx, v in rollout.calls:
        want = uncached_velocity(rollout, clean, x, ctx, units.__getitem__)
        worst = max(worst, float((v - want).abs().max()))
    return worst


CASES = [  # batch, latent height, latent width, token grid, frames, block, prefix
    (1, 8, 12, (4, 6), 6, 3, 0),
    (2, 8, 12, (4, 6), 5, 1, 1),
    (1, 8, 12, (4, 6), 11, 3, 7),
    (1, 9, 14, (5, 7), 7, 3, 0),
    (2, 10, 13, (5, 7), 7, 4, 3),
    (1, 9, 14, (5, 7), 4, 1, 0),
    (1, 9, 13, (5, 7), 8, 3, 1),
    (1, 29, 26, (15, 13), 5, 4, 0),
    (1, 30, 25, (15, 13), 5, 3, 1),
]


@pytest.mark.parametrize(("batch", "height", "width", "grid", "frames", "block", "prefix"), CASES)
def test_cache_equals_no_cache(batch: int, height: int, width: int, grid: tuple[int, int], frames: int, block: int, prefix: int) -> None:
    assert token_grid(height, width) == grid
    rollout = Rollout((batch, 4, frames, height, width), block, FULL, prefix)
    assert worst_call(rollout, units_of(rollout)) <= TOLERANCE
    assert all(v.std() > 0.1 for _, _, v in rollout.calls), "outputs near zero would pass every comparison"


def test_rows_of_a_batch_do_not_mix() -> None:
    both = Rollout((2, 4, 6, 8, 12), 3, FULL)
    out = both.run()
    for row in range(2):
        alone = Rollout((2, 4, 6, 8, 12), 3, FULL)
        alone.plan.noise[1 - row] = 0.0
        assert (alone.run()[row] - out[row]).abs().max() <= TOLERANCE


@pytest.mark.parametrize("wrong", ["frame-causal", "bidirectional", "next block seen one too early", "window"])
def test_a_wrong_rule_is_noticed(wrong: str) -> None:
    rollout = Rollout((1, 4, 9, 8, 12), 3, window(6) if wrong == "window" else FULL)
    units = units_of(rollout)
    wrong_units = {
        "frame-causal": list(range(9)),
        "bidirectional": [0] * 9,
        "window": units,
        "next block seen one too early": [0] * 4 + [1] * 3 + [2] * 2,
    }[wrong]
    assert worst_call(rollout, wrong_units) > 100 * TOLERANCE


@pytest.mark.parametrize("lost", ["commit", "clean"])
def test_without_clean_keys_the_result_is_another(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache content of the last denoise step instead of the clean pass, or of none at all, is far away."""
    right = Rollout((1, 4, 9, 8, 12), 3, FULL).run()
    rollout = Rollout((1, 4, 9, 8, 12), 3, FULL)
    plain = rollout.engine.velocity

    def velocity(x: torch.Tensor, ctx: object) -> torch.Tensor:
        if ctx.phase == "clean":  # type: ignore[attr-defined]
            x = rollout.calls[-1][0] if lost == "clean" else torch.zeros_like(x)
        return plain(x, ctx)  # type: ignore[arg-type]

    monkeypatch.setattr(rollout.engine, "velocity", velocity)
    assert (rollout.run() - right).abs().max() > 1e-2


def test_poisoned_memory_is_never_read(poisoned_memory: None) -> None:
    for settings in (FULL, window(5, 1), window(4, 1, positions="slot")):
        out = Rollout((1, 4, 8, 9, 14), 3, settings, prefix=1).run()
        assert torch.isfinite(out).all()
    assert torch.empty(3).isnan().all(), "the memory was not poisoned"
