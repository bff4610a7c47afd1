"""The measured part of a group's bias: its mean key gets what its members got."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.tempcache_tools import Followed, Synthetic, tc
from fastar_pack.fastar_core.noise import seeded_normal
from fastar_pack.fastar_core.tempcache.step_recall import StepRecall

pytestmark = pytest.mark.cpu
FRAMES = 42


def wide_apart(phase: str, frame: int, layer: int) -> Tensor:
    """Frames that come back with a change large enough that a mean key loses mass."""
    base = seeded_normal(10 * (frame % 5) + layer, (3, 1, 6, 2, 24))
    own = seeded_normal(77 + 100 * frame + layer + (5 if phase == "denoise" else 0), (3, 1, 6, 2, 24))
    return 2 * base + own


def run(**changes: Any) -> Followed:
    settings: dict[str, Any] = {"budget_frames": 7, "threshold": 0.7, "shared": False, **changes}
    return Followed(tc(**settings), make=wide_apart, layers=1)


class Watch:
    """Masses that the last commit measured for every row it changed: members' before, representatives' after at bias 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        plain = StepRecall._correct
        watch = self

        def seen(self: StepRecall, rows: Tensor, before: Tensor, after: Tensor) -> None:
            watch.old = self._pool.correction
            plain(self, rows, before, after)
            watch.rows, watch.before, watch.after = rows, before, after

        monkeypatch.setattr(StepRecall, "_correct", seen)


def test_a_group_gets_what_its_members_got(monkeypatch: pytest.MonkeyPatch) -> None:
    """Summed over the measured queries, relative to the normaliser of the pass, for every group of two or more."""
    watch = Watch(monkeypatch)
    made = run(bias_correction=50.0).go(FRAMES)
    bias = torch.gather(made.pool().bias(), 2, watch.rows)
    groups = (torch.gather(made.pool().count, 2, watch.rows) > 1) & (watch.before > 1e-9)
    assert groups.sum() > 20
    got = (watch.after * bias.exp())[groups] / watch.before[groups]
    free = torch.gather(made.pool().correction, 2, watch.rows)[groups] > 0
    assert free.float().mean() > 0.5, "mean keys lose mass"
    assert (got[free] - 1).abs().max() <= 0.51 / 1024, "corrections are multiples of 1 / 1024"
    counts = torch.gather(made.pool().count, 2, watch.rows)[groups].float()
    alone = watch.after[groups] * counts / watch.before[groups]
    assert alone[free].median() < 0.9, "the log count alone gives them less"


@pytest.mark.parametrize("most", [0.0, 0.1, 0.3])
def test_the_correction_stays_in_its_range(most: float) -> None:
    correction = run(bias_correction=most).go(FRAMES).pool().correction
    assert correction.min() >= 0
    assert float(correction.max()) == pytest.approx(most)


def test_for_other_representatives_it_goes_both_ways() -> None:
    correction = run(bias_correction=0.3, representative="last").go(FRAMES).pool().correction
    assert float(correction.min()) == pytest.approx(-0.3)
    assert float(correction.max()) == pytest.approx(0.3)


def test_equal_keys_need_none() -> None:
    """At one position the log count is exact, and what is measured says so."""
    def still(phase: str, frame: int, layer: int) -> Tensor:
        keys = seeded_normal(layer, (1, 1, 6, 2, 24))
        return torch.stack([seeded_normal(100 + frame, keys.shape)[0], keys[0], seeded_normal(500 + frame, keys.shape)[0]])

    made = Synthetic(tc(budget_frames=6), FRAMES, make=still, scale_t=0).go(FRAMES)
    assert int(made.pool().count.max()) > 30
    assert made.pool().correction.abs().max() <= 1e-5


def test_rows_of_one_token_and_new_groups_have_none() -> None:
    made = run(threshold=0.9, floor=0.9, regroup=False).go(FRAMES)
    pool = made.pool()
    assert (pool.count == 1).any()
    assert made.evictions, "rows have changed hands"
    assert not pool.correction[pool.count <= 1].any()
    assert pool.correction[pool.count > 1].any()


def test_rows_the_queries_do_not_see_keep_theirs() -> None:
    made = run().go(FRAMES)
    pool, rows = made.pool(), torch.arange(made.pool().capacity)[None, None].expand(1, 2, -1)
    before = pool.correction.clone()
    step = StepRecall(torch.zeros(1, 2, 4, 24), torch.zeros(1, 2, 6, 24), None, 6, 0, pool)
    step._correct(rows, torch.zeros(rows.shape), torch.zeros(rows.shape))
    assert torch.equal(pool.correction, before.masked_fill(pool.count <= 1, 0))


def test_output_and_recall_gain_by_it() -> None:
    told = {}
    for most in (0.0, 0.3):
        blocks = run(bias_correction=most).go(FRAMES).blocks()
        told[most] = sum(b["step_recall"][0] for b in blocks[4:]) / len(blocks[4:])
    assert told[0.3] > told[0.0]


def test_a_roll_back_restores_it() -> None:
    made = run().go(FRAMES)
    before = made.pool().correction.clone()
    made.go(FRAMES + 3, FRAMES)
    assert not torch.equal(made.pool().correction, before)
    made.policy.rollback(FRAMES)
    assert torch.equal(made.pool().correction, before)


@pytest.mark.parametrize("changes", [{"space": "pre"}, {"reindex_span": 9}, {}])
def test_the_first_commit_of_a_timeline_measures_what_the_call_saw(changes: dict[str, Any]) -> None:
    """With nothing merged a first commit whose frames leave at once moves no attention: keys are turned as in the call."""
    made = Synthetic(tc(budget_frames=20, threshold=1.01, recent_frames=0, **changes), FRAMES, make=wide_apart).go(3)
    assert min(made.blocks()[0]["step_recall"]) >= 1 - 1e-5
