"""AnnSA for cache policies: equal to dense where it must be, right buckets where it is not, only where the settings say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core.annsa_tools import COLS, ROWS, SCHEDULE, SPARSE, TOKENS, context, dense, error, key_rows, planted, run
from fastar_pack.fastar_core.annsa import AnnSASettings, SparseAttention, sparse, walk
from fastar_pack.fastar_core.annsa.cost import CallSize, pays, predicted_times
from fastar_pack.fastar_core.annsa.key_buffer import pick_rows
from fastar_pack.fastar_core.annsa.tally import layers_to_keep_dense
from fastar_pack.fastar_core.errors import ConfigError
from fastar_pack.fastar_core.key_rows import KeyRows, frame_parts

pytestmark = pytest.mark.cpu
EXACT = 1e-5


@pytest.mark.parametrize("buckets", ["kmeans", "sign"])
@pytest.mark.parametrize("dim", [12, 24, 64, 128])
def test_density_one_is_dense(buckets: str, dim: int) -> None:
    q, k, v = planted(12, dim=dim, batch=2)
    out, sparse_run = run(replace(SPARSE, density=1.0, buckets=buckets), q, k, v)
    assert (out - dense(q, k, v)).abs().max() <= EXACT
    assert sparse_run.report()["density"] == 1.0


@pytest.mark.parametrize("buckets", ["kmeans", "sign"])
def test_planted_clusters_are_found_at_a_fraction_of_the_pairs(buckets: str) -> None:
    q, k, v = planted(20)
    out, sparse_run = run(replace(SPARSE, buckets=buckets, query_buckets=8), q, k, v)
    assert error(out, dense(q, k, v)) < 0.1
    report = sparse_run.report()
    assert 0.2 < report["density"] <= 0.4
    assert report["density_floor"] == pytest.approx(4 / 20, abs=1e-4)


def test_visiting_other_buckets_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = planted(20)
    true = walk.expected_mass
    monkeypatch.setattr(walk, "expected_mass", lambda *a: true(*a).flip(-1))
    out, _ = run(replace(SPARSE, query_buckets=8), q, k, v)
    assert error(out, dense(q, k, v)) > 0.3


def test_the_bias_of_representatives_goes_with_them() -> None:
    q, k, v = planted(14, sharpness=4.0)
    bias = torch.zeros(1, 1, k.shape[1])
    merged = slice(2 * TOKENS, 8 * TOKENS)
    bias[..., merged] = torch.randint(1, 90, (6 * TOKENS,)).float().log()
    bias[..., 8 * TOKENS - 5:8 * TOKENS] = -torch.inf
    ctx = context(12)
    parts = (*frame_parts([0, 9], TOKENS), (2 * TOKENS, 6 * TOKENS, None), *frame_parts([8, 9, 10, 11, 12, 13], TOKENS, 8 * TOKENS))
    rows = KeyRows(0, ctx, "a", parts, 1)
    for buckets in ("kmeans", "sign"):
        out, _ = run(replace(SPARSE, density=1.0, buckets=buckets), q, k, v, bias, rows)
        assert (out - dense(q, k, v, bias)).abs().max() <= EXACT
    assert (out - dense(q, k, v)).abs().max() > 1e-2, "the counts matter here"
    q, k, v = planted(14)
    poisoned = k.clone()
    poisoned[:, 8 * TOKENS - 5:8 * TOKENS] = 1e4
    hidden, _ = run(replace(SPARSE, density=0.6, query_buckets=8), q, poisoned, v, bias, rows)
    assert error(hidden, dense(q, k, v, bias)) < 0.1, "hidden rows neither count nor draw queries"


@pytest.mark.parametrize("case", ["one history key", "equal keys", "zero keys", "one query", "all apart"])
@pytest.mark.parametrize("buckets", ["kmeans", "sign"])
def test_odd_rows_give_finite_answers(case: str, buckets: str) -> None:
    q, k, v = planted(12, dim=12)
    parts = frame_parts(list(range(12)), TOKENS)
    if case == "one history key":
        k, v = (torch.cat([x[:, :TOKENS], x[:, 5 * TOKENS:5 * TOKENS + 1], x[:, 10 * TOKENS:]], 1) for x in (k, v))
        parts = ((0, TOKENS, 0), (TOKENS, 1, None), *frame_parts([10, 11], TOKENS, TOKENS + 1))
    elif case == "equal keys":
        k = k[:, :1].expand_as(k).contiguous()
    elif case == "zero keys":
        k = torch.zeros_like(k)
    elif case == "one query":
        q = q[:, :1]
    else:
        k = torch.eye(k.shape[1], 12).mul(50)[None, :, None].expand_as(k).contiguous()
    settings = replace(SPARSE, buckets=buckets, density=0.99 if case == "one history key" else 0.5)
    out, _ = run(settings, q, k, v, rows=KeyRows(0, context(10), "a", parts, 1))
    assert out is not None
    assert out.isfinite().all()
    assert out.abs().max() <= v.abs().max() + EXACT, "a mean of values stays among them"
    whole, _ = run(replace(settings, density=1.0), q, k, v, rows=KeyRows(0, context(10), "a", parts, 1))
    assert (whole - dense(q, k, v)).abs().max() <= EXACT


def test_it_runs_exactly_where_the_settings_say() -> None:
    settings = replace(SPARSE, dense_layers=(1,), dense_share=0.3)
    sparse_run = SparseAttention(settings, SCHEDULE)
    q, k, v = planted(12)
    called = [(sigma, layer, phase) for sigma in (1.0, 0.95, 0.9, 0.9, 0.8, 0.55, 0.4, 0.01, 0.0) for layer in range(3)
              for phase in ("denoise", "clean") if (phase == "clean") == (sigma == 0)]
    for sigma, layer, phase in called:
        out, _ = run(settings, q, k, v, rows=key_rows(layer, context(10, 2, sigma, phase)), sparse=sparse_run)
        assert (out is None) == (sigma > 0.9 or layer == 1 or phase == "clean")
    assert sparse_run.tally.ran == {(s, layer) for s, layer, phase in called if phase == "denoise" and s <= 0.9 and layer != 1}
    assert sparse_run.report()["calls"] == {"dense: noisy step": 6, "dense: layer in the list": 6, "sparse": 12}


@pytest.mark.parametrize(("steps", "first"), [(1, 0), (2, 1), (4, 1), (5, 2), (50, 15)])
def test_the_dense_share_counts_in_the_runs_own_schedule(steps: int, first: int) -> None:
    schedule = [1 - i / steps for i in range(steps)]
    window = SparseAttention(AnnSASettings(), [*schedule, 0.0]).window
    assert [s in window for s in schedule] == [i >= first for i in range(steps)]


def test_noisier_frames_of_a_call_stay_dense() -> None:
    q, k, v = planted(20, own=4, seed=3)
    rows = key_rows(0, context(16, 4, (0.4, 0.7, 0.95, 1.0)))
    out, sparse_run = run(replace(SPARSE, density=0.45), q, k, v, rows=rows)
    truth = dense(q, k, v)
    assert (out[:, 2 * TOKENS:] - truth[:, 2 * TOKENS:]).abs().max() <= EXACT
    assert (out[:, :2 * TOKENS] - truth[:, :2 * TOKENS]).abs().max() > 1e-3
    assert sparse_run.tally.ran == {(0.7, 0)}


def test_keys_are_sorted_once_per_block_and_own_rows_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []
    true = sparse.build
    monkeypatch.setattr(sparse, "build", lambda *a: built.append(1) or true(*a))
    q, k, v = planted(20)
    settings = replace(SPARSE, query_buckets=8)
    _, sparse_run = run(settings, q, k, v)
    for step in (2, 3):
        k, v = k.clone(), v.clone()
        k[:, -2 * TOKENS:] = torch.randn_like(k[:, -2 * TOKENS:])
        v[:, -2 * TOKENS:] = 5 + step
        out, _ = run(settings, q, k, v, rows=key_rows(0, context(18, step=step)), sparse=sparse_run)
        assert error(out, dense(q, k, v)) < 0.1
    assert len(built) == 1
    run(settings, q, k, v, rows=key_rows(0, context(18, phase="clean", sigma=0.0)), sparse=sparse_run)
    v = planted(20, seed=8)[2]
    out, _ = run(settings, q, k, v, rows=key_rows(0, context(18)), sparse=sparse_run)
    assert len(built) == 2, "a committing call ends the order"
    assert error(out, dense(q, k, v)) < 0.1
    run(settings, q, k, v, rows=key_rows(0, context(18), owner="b"), sparse=sparse_run)
    assert len(built) == 3, "each branch has an order of its own"


def test_pairs_go_where_mass_is() -> None:
    """Layer 0 looks at one cluster, layer 1 at everything: balanced over the model, layer 1 gets the larger part."""
    settings = replace(SPARSE, query_buckets=8, density=0.5)
    shares = {}
    for balance in ("layer", "model"):
        sparse_run = SparseAttention(replace(settings, balance=balance), SCHEDULE)
        for start in (16, 18):
            visited = []
            for layer, sharpness in enumerate((60.0, 0.5)):
                q, k, v = planted(start + 2, seed=layer, sharpness=sharpness)
                run(settings, q, k, v, rows=key_rows(layer, context(start)), sparse=sparse_run)
                visited.append(float(sparse_run.tally._pairs[-1]))
        shares[balance] = visited
        assert sparse_run.tally.density() <= 0.52
    assert shares["layer"][1] == pytest.approx(shares["layer"][0], rel=0.2)
    assert shares["model"][1] > 1.5 * shares["model"][0]


def test_calibration_measures_and_changes_nothing() -> None:
    settings = replace(SPARSE, calibrate=True, only_if_faster=True, dense_layers=(0,), query_buckets=8)
    sparse_run = SparseAttention(settings, SCHEDULE)
    for layer, sharpness in enumerate((60.0, 0.01, 30.0)):
        q, k, v = planted(20, seed=layer, sharpness=sharpness)
        out, _ = run(settings, q, k, v, rows=key_rows(layer, context(18)), sparse=sparse_run)
        assert out is None
    report = sparse_run.report()
    recall = report["layer_recall"]
    assert recall[0] > 0.97
    assert recall[2] > 0.9
    assert 0.35 < recall[1] < 0.5, "flat attention keeps what it visits: the density"
    assert report["keep_dense"] == [1]
    assert layers_to_keep_dense({0: 0.9, 1: 0.99, 2: 0.5, 3: 0.95}, 0.94) == [2]
    assert layers_to_keep_dense({0: 0.9, 1: 0.5}, 0.94) == [0, 1]
    assert layers_to_keep_dense({0: 0.95}, 0.94) == []


def test_recall_is_the_mass_on_what_was_visited() -> None:
    q, k, v = planted(20, sharpness=6.0)
    sparse_run = SparseAttention(replace(SPARSE, calibrate=True), SCHEDULE)
    caught: list[Tensor] = []
    true = sparse.kept_mass

    def both(chosen: walk.Walk, queries: walk.Queries, buffer: object, seed: int) -> Tensor:
        """The same mass by brute force: a constant value on visited rows comes out as their share."""
        found = true(chosen, queries, buffer, seed)
        scores = queries.q.transpose(1, 2) @ buffer.keys.transpose(2, 3) / 24**0.5
        seen = torch.zeros_like(scores, dtype=torch.bool)
        seen[..., :buffer.always] = True
        seen[..., buffer.rows - buffer.own:] = True
        for h in range(2):
            for row in range(scores.shape[2]):
                for bucket in chosen.chosen[0, h, queries.codes[0, h, row]].nonzero().flatten().tolist():
                    seen[0, h, row, buffer.offsets[0, h, bucket]:buffer.offsets[0, h, bucket + 1]] = True
        some = torch.randint(scores.shape[2], (32,), generator=torch.Generator().manual_seed(seed))
        mass = (scores.softmax(-1) * seen).sum(-1)
        caught.append(mass[:, :, some].mean(-1))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse, "kept_mass", both)
        run(SPARSE, q, k, v, sparse=sparse_run)
    assert sparse_run.tally.layer_recall()[0] == pytest.approx(float(caught[0].mean()), abs=1e-5)


def test_the_cost_rule_is_said() -> None:
    q, k, v = planted(12)
    out, sparse_run = run(replace(SPARSE, only_if_faster=True), q, k, v)
    assert out is None
    assert sparse_run.report()["calls"] == {"dense: sparse would not be 10 % faster": 1}
    large = CallSize(4680, 191_880, 12, 128, 16, 64)
    assert pays(large, 0.28, "cuda", 2)
    assert not pays(large, 0.9, "cuda", 2)
    assert not pays(CallSize(1560, 4680, 12, 128, 8, 64), 0.28, "cuda", 2), "a short window is not worth it"
    assert pays(CallSize(1560, 20_000, 4, 128, 4, 4), 0.25, "cpu")
    for device in ("cpu", "cuda", "mps"):
        assert predicted_times(large, 0.5, device)[1] > predicted_times(large, 0.1, device)[1]


def test_reasons_of_dense_calls() -> None:
    q, k, v = planted(4)
    assert run(SPARSE, q, k, v)[1].report()["calls"] == {"dense: no history beyond the always visible frames": 1}
    q, k, v = planted(6)
    assert run(SPARSE, q, k, v)[1].report()["calls"] == {"dense: always visible keys use up the density": 1}


def test_settings_refuse_nonsense() -> None:
    for wrong in ({"density": 0}, {"density": 1.1}, {"buckets": "some"}, {"balance": "x"}, {"key_buckets": 0}, {"dense_share": 2}):
        with pytest.raises(ConfigError):
            AnnSASettings(**wrong)
    assert ROWS * COLS == TOKENS


@pytest.mark.parametrize("layout", ["rows", "heads", "slice of rows", "slice of heads"])
def test_rows_are_picked_from_any_layout(layout: str) -> None:
    x = torch.randn(2, 9, 3, 4) if "rows" in layout else torch.randn(2, 3, 9, 4).transpose(1, 2)
    x = x[:, 1:7] if "slice" in layout else x
    rows = torch.randint(x.shape[1], (2, 3, 5))
    want = torch.stack([torch.stack([x[b, rows[b, h], h] for h in range(3)]) for b in range(2)])
    assert torch.equal(pick_rows(x, rows), want)
