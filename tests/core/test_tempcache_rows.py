"""How running means are stored: hundreds of updates in low precision, and what eight bits cost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.tempcache_tools import pool_of, tc
from fastar_pack.fastar_core.tempcache.rows import MeanRows, PackedRows

pytestmark = pytest.mark.cpu
HALF = [torch.bfloat16, torch.float16]
UPDATES = 750
ONE_CODING = 1 / (127 * 508)  # of the largest number of a row: half a fine step


def running(rows: MeanRows | PackedRows, updates: int = UPDATES) -> tuple[Tensor, Tensor]:
    """The mean of ``updates`` rows kept in ``rows``, and the exact one, [B, H, 4, D]."""
    generator = torch.Generator().manual_seed(3)
    index = torch.arange(4)[None, None]
    total = torch.zeros(1, 2, 4, 16, dtype=torch.float64)
    for n in range(1, updates + 1):
        new = (3 + torch.randn(total.shape, generator=generator)).bfloat16().float()
        total += new.double()
        rows.write(index, (rows.pick(index) * (n - 1) + new) / n)
    return rows.pick(index).double(), total / updates


def test_high_and_low_part_are_the_float32_number() -> None:
    given = torch.cat([torch.randn(4000), 1e-30 * torch.randn(50), 1e30 * torch.randn(50), torch.zeros(60)]).view(1, 1, -1, 16)
    index = torch.arange(given.shape[2])[None, None]
    rows = MeanRows(torch.zeros(given.shape, dtype=torch.bfloat16))
    rows.write(index, given)
    assert torch.equal(rows.read(), given)
    assert torch.equal(rows.pick(index), given)
    assert torch.equal(rows.high, given.to(torch.bfloat16)), "attention reads the rounded number"


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_mean_of_750_updates_stays_exact(dtype: torch.dtype) -> None:
    got, exact = running(MeanRows(torch.zeros(1, 2, 4, 16, dtype=dtype)))
    assert ((got - exact) / exact).abs().max() <= 2**-14


def test_a_mean_in_bfloat16_alone_does_not() -> None:
    rows = MeanRows(torch.zeros(1, 2, 4, 16, dtype=torch.bfloat16))
    rows.low = None
    got, exact = running(rows)
    assert ((got - exact) / exact).abs().max() > 2**-8


def test_packed_rows_stay_within_their_bound_for_750_updates() -> None:
    got, exact = running(PackedRows(torch.zeros(1, 2, 4, 16)))
    assert ((got - exact).abs() / exact.abs().amax(-1, keepdim=True)).max() <= 40 * ONE_CODING


def test_eight_bits_alone_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = PackedRows.write

    def coarse_only(self: PackedRows, index: Tensor, rows: Tensor) -> None:
        plain(self, index, rows)
        self.fine.zero_()

    monkeypatch.setattr(PackedRows, "write", coarse_only)
    got, exact = running(PackedRows(torch.zeros(1, 2, 4, 16)))
    assert ((got - exact).abs() / exact.abs().amax(-1, keepdim=True)).max() > 400 * ONE_CODING


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_one_coding_errs_by_half_a_fine_step(scale: float) -> None:
    rows = PackedRows(torch.zeros(2, 2, 32, 16))
    index = torch.arange(32)[None, None].expand(2, -1, -1)
    given = scale * torch.randn(2, 2, 32, 16)
    rows.write(index, given)
    bound = given.abs().amax(-1, keepdim=True) * ONE_CODING
    assert ((rows.read() - given).abs() <= 1.01 * bound).all()
    assert ((rows.read() - given).abs() > 0.5 * bound).any(), "the bound is not slack"
    rows.fine.zero_()
    assert ((rows.read() - given).abs() > 100 * bound).any(), "the coarse plane alone is plain int8"


def test_rows_of_zeros_are_zeros_in_any_form() -> None:
    index = torch.arange(4)[None, None]
    for rows in (MeanRows(torch.zeros(1, 1, 4, 8).bfloat16()), PackedRows(torch.zeros(1, 1, 4, 8))):
        rows.write(index, torch.ones(1, 1, 4, 8))
        rows.write(index, torch.zeros(1, 1, 4, 8))
        assert torch.equal(rows.read(), torch.zeros(1, 1, 4, 8))
        rows.write(index, torch.ones(1, 1, 4, 8))
        rows.clear()
        assert not rows.read().any()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("packed", [False, True])
def test_raw_rows_go_back_as_they_were(packed: bool, dtype: torch.dtype) -> None:
    like = torch.zeros(1, 2, 64, 48, dtype=dtype)
    rows: MeanRows | PackedRows = PackedRows(like) if packed else MeanRows(like)
    every = torch.arange(64)[None, None]
    rows.write(every, torch.randn(1, 2, 64, 48))
    before = [t.clone() for t in rows.tensors()]
    some = torch.tensor([5, 9, 5])[None, None]
    saved = rows.raw(some)
    rows.write(some, torch.ones(1, 2, 3, 48))
    assert not all(torch.equal(a, b) for a, b in zip(before, rows.tensors()))
    rows.restore(some, saved)
    assert all(torch.equal(a, b) for a, b in zip(before, rows.tensors()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_group_of_thousands(dtype: torch.dtype) -> None:
    """Counts are whole numbers beyond what bfloat16 can count to, and the mean stays exact."""
    settings = tc(budget_frames=9, threshold=0.5).tempcache
    assert settings is not None
    pool = pool_of(settings, 12, dtype=dtype)
    key, total = torch.randn(1, 2, 1, 24).to(dtype).expand(-1, -1, 6, -1), torch.zeros(12, 2, 24, dtype=torch.float64)
    for frame in range(800):
        value = (2 + torch.randn(1, 2, 6, 24)).to(dtype)
        went = pool.ingest(key, value, frame, torch.zeros(1, 1, 6), None)
        total.index_add_(0, went.slot[0, 0], value[0].transpose(0, 1).double())
    counts = pool.count[0, 0]
    row = int(counts.argmax())
    assert int(counts.sum()) == 4800
    assert int(counts[row]) > 4700, "equal keys stand together, but for those of the first frame, which had no group to join"
    mean = total[row] / int(counts[row])
    picked = pool.values.pick(torch.tensor([[[row]]]))[0, :, 0].double()
    assert ((picked - mean) / mean).abs().max() <= 2**-14
    assert (pool.values.high[0, :, row].double() - mean).abs().max() > 2**-14 or dtype == torch.float32  # type: ignore[union-attr]
    assert int(pool.frame[0, 0, row]) == 799
