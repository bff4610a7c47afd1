"""What is promised before a run and told after it: bytes, budgets, step recall, the shape of the report."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from core.tempcache_tools import Followed, Synthetic, tc
from fastar_pack.fastar_core.errors import ConfigError, MemoryPlanError
from fastar_pack.fastar_core.geometry import RunGeometry
from fastar_pack.fastar_core.tempcache.plan import PRESETS, budget_from_bytes, plan_tempcache, with_budget

pytestmark = pytest.mark.cpu
WAYS: list[dict[str, Any]] = [
    {}, {"shared": False}, {"space": "pre"}, {"representative": "medoid"}, {"representative": "last", "reindex_span": 10},
    {"history_type": "int8"}, {"history_type": "int8", "space": "pre"}, {"similarity": "logit", "threshold": 0.3},
    {"search": "lsh"}, {"recent_frames": 0}, {"recent_frames": 6}, {"budget_frames": 50},
]
SIZES: list[dict[str, Any]] = [
    {"rows": 2, "cols": 3, "heads": 2, "dim": 24, "layers": 2}, {"rows": 4, "cols": 5, "heads": 4, "dim": 16, "layers": 3, "batch": 2},
    {"rows": 3, "cols": 4, "heads": 3, "dim": 64, "layers": 1, "block": 1},
]


# -- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("changes", WAYS)
def test_the_plan_is_true_to_five_percent(changes: dict[str, Any], sizes: dict[str, Any], dtype: torch.dtype) -> None:
    settings = tc(sink=1, **{"budget_frames": 12, "threshold": 0.8, **changes})
    run = Synthetic(settings, 36, dtype=dtype, **sizes)
    for start in range(0, 36, run.block):
        for branch in ("p", "n"):
            run.call("denoise", start, run.block, branch)
        ctx = run.ctx("clean", start, run.block)
        run.run.begin(ctx)
        for branch in ("p", "n"):
            for layer in range(run.layers):
                run.run.policy(branch).attend(layer, *run.qkv("clean", start, run.block, layer), ctx)
        run.run.end()
    assert settings.tempcache is not None
    plan = plan_tempcache(settings.tempcache, 1, run.run.geometry, run.heads, run.dim, dtype.itemsize, 2 * run.batch)
    assert plan.total_bytes == pytest.approx(run.run.peak_bytes, rel=0.05)
    smaller = plan_tempcache(replace(settings.tempcache, budget_frames=settings.tempcache.budget_frames - 3), 1, run.run.geometry,
                             run.heads, run.dim, dtype.itemsize, 2 * run.batch)
    assert smaller.total_bytes != pytest.approx(run.run.peak_bytes, rel=0.05) or changes.get("budget_frames") == 50
    filled = run.blocks()
    full = [b["start"] + run.block for b in filled if b["rows"][0] == run.store().sizes.pinned_rows + run.pool().capacity]
    if plan.full_at_frame is None:
        assert not full or full[0] >= 36
    else:
        assert not full or full[0] >= plan.full_at_frame


def test_bytes_count_every_tensor_the_policy_holds() -> None:
    """Against a walk through all objects: nothing is left out, views count once."""
    import gc

    def reach(thing: object, seen: set[int], found: dict[int, int]) -> None:
        if id(thing) in seen or isinstance(thing, (type, str, int, float)) or callable(thing):
            return
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
            return
        for part in gc.get_referents(thing):
            reach(part, seen, found)

    for changes in WAYS:
        run = Synthetic(tc(**{"budget_frames": 8, "threshold": 0.8, **changes}), 40).go(30)
        for phase in ("denoise", "clean"):
            ctx = run.ctx(phase, 30, 3)  # type: ignore[arg-type]
            run.run.begin(ctx)
            for layer in range(2):
                run.run.policy("p").attend(layer, *run.qkv(phase, 30, 3, layer), ctx)
            found: dict[int, int] = {}
            seen = {id(run.policy.attention), id(run.policy.stats)}
            reach(run.policy.__dict__, seen, found)
            own = run.policy.bytes()
            tallies = 2 * 24 + 4 * 64  # counts for the report
            assert own <= sum(found.values()) <= own + tallies, (changes, phase)


def test_presets_grow_from_small_to_quality() -> None:
    budgets = [PRESETS[key].budget_frames for key in ("small", "balanced", "quality")]
    assert budgets == sorted(set(budgets))
    assert list(PRESETS) == ["quality", "balanced", "small"]


def test_a_budget_in_bytes_is_the_largest_that_fits() -> None:
    geometry = RunGeometry(200, 3, 30, 52, 30)
    settings = PRESETS["balanced"]

    def bytes_of(frames: float) -> int:
        return plan_tempcache(replace(settings, budget_frames=frames), 3, geometry, 12, 128, 2, 1).total_bytes

    for room in (10**10, 15 * 10**9):
        found = budget_from_bytes(settings, 3, geometry, 12, 128, 2, 1, room)
        assert bytes_of(found.budget_frames) <= room < bytes_of(found.budget_frames + 1)
    assert budget_from_bytes(settings, 3, geometry, 12, 128, 2, 1, 10**12).budget_frames == 200
    with pytest.raises(MemoryPlanError, match="even a budget of 7 latent frames does not fit"):
        budget_from_bytes(settings, 3, geometry, 12, 128, 2, 1, 10**8)


def test_a_budget_without_history_is_refused() -> None:
    assert with_budget(PRESETS["small"], 30, 3).budget_frames == 30
    with pytest.raises(ConfigError, match="a budget of 6 latent frames holds no history beside 3 sink and 3 recent frames; set it to 7"):
        with_budget(PRESETS["small"], 6, 3)


def test_the_plan_in_words() -> None:
    geometry = RunGeometry(200, 3, 30, 52, 30)
    plan = plan_tempcache(replace(PRESETS["balanced"], budget_frames=21), 3, geometry, 12, 128, 2, 1)
    assert plan.words() == (f"TempCache holds {plan.layer_bytes / 10**6:.3g} MB per layer, {plan.total_bytes / 10**9:.3g} GB in all; "
                            "its history is full after 21 latent frames at the latest")
    short = plan_tempcache(PRESETS["balanced"], 3, RunGeometry(9, 3, 30, 52, 30), 12, 128, 2, 1)
    assert short.words().endswith("its history is never full")


# -- step recall -----------------------------------------------------------------------------------------------------


def masses(q: Tensor, keys: Tensor, log_m: Tensor) -> Tensor:
    return (q @ keys.T / q.shape[1] ** 0.5 + log_m).softmax(-1)


@dataclass
class Commit:
    """What a commit of 3 frames at frame 30 found and left, of layer 0 and batch row 0."""

    queries: Tensor
    pinned: list[int]
    bound: int
    members: dict[Any, list[tuple[int, int]]]
    before: tuple[Tensor, Tensor | None]
    after: tuple[Tensor, Tensor]


def commit(run: Followed) -> Commit:
    """Runs a clean pass at frame 30 and looks at the keys before and after its commit, turned alike."""
    policy, store = run.policy, run.store()
    tables, pinned, members = policy.tables, list(policy.ledger.frames), {at: list(m) for at, m in run.members.items()}
    ctx = run.ctx("clean", 30, 3)
    run.run.begin(ctx)
    run.run.policy("p").attend(0, *run.qkv("clean", 30, 3, 0), ctx)
    assert store.pending is not None
    assert store.pending.queries is not None
    queries = store.pending.queries[0].float()
    keys, _, bias = store.visible(len(pinned), store.pending.own, tables)
    before, bound = (keys[0].clone(), None if bias is None else bias[0].clone()), store.bound
    after: list[Tensor] = []
    plain = store.refresh

    def refresh(*args: Any) -> None:
        pool, slots = run.pool(), len(policy.ledger.frames) * 6
        every = torch.arange(pool.capacity).expand(1, pool.groups, -1)
        parts = [store.keys[:, :, :slots], store._turned(every, tables)]
        after.extend([torch.cat([p.float() for p in parts], 2)[0], torch.nn.functional.pad(pool.bias(), (slots, 0))[0]])
        plain(*args)

    store.refresh = refresh  # type: ignore[method-assign]
    run.run.end()
    return Commit(queries, pinned, bound, members, before, (after[0], after[1]))


def moved(run: Followed, one: Commit, head: int) -> Tensor:
    """Sum over groups of |mass before - mass after| per query, by plain loops over tokens and rows."""
    tokens, g = 6, head if run.pool().groups > 1 else 0
    keys, bias = one.before
    old = masses(one.queries[head], keys[head], torch.zeros(keys.shape[1]) if bias is None else bias[g])
    new = masses(one.queries[head], one.after[0][head], one.after[1][g])
    starts = {f: i * tokens for i, f in enumerate(one.pinned)}
    starts |= {30 + i: len(one.pinned) * tokens + one.bound + i * tokens for i in range(3)}
    mass = {(f, cell): old[:, at + cell] for f, at in starts.items() for cell in range(tokens)}
    change, placed = torch.zeros(2, old.shape[0])
    frames = run.policy.ledger.frames
    for i, place in enumerate((f, cell) for f in frames for cell in range(tokens)):
        change, placed = change + (mass[place] - new[:, i]).abs(), placed + mass[place]
    home = {m: slot for slot in range(run.pool().capacity) for m in one.members.get((0, 0, g, slot), [])}
    for slot in range(run.pool().capacity):
        now = run.members.get((0, 0, g, slot), [])
        groups = {home[m] for m in now if m in home}
        total = sum((mass[m] for m in now if m not in home), torch.zeros_like(placed))
        total = total + sum(old[:, len(one.pinned) * tokens + group] for group in groups)
        change, placed = change + (total - new[:, len(frames) * tokens + slot]).abs(), placed + total
    return change + 1 - placed  # what lost its place is one group without any mass afterwards


@pytest.mark.parametrize("changes", [{}, {"space": "pre", "representative": "last"}, {"shared": False}, {"history_type": "int8"},
                                     {"reindex_span": 9}, {"recent_frames": 0}])
def test_step_recall_is_what_the_formula_says(changes: dict[str, Any]) -> None:
    run = Followed(tc(**{"budget_frames": 7, "threshold": 0.8, "floor": 0.5, **changes}), layers=1)
    run.go(30)
    one = commit(run)
    wanted = torch.stack([(1 - moved(run, one, head) / 2).mean() for head in range(2)]).mean()
    told = run.blocks()[-1]["step_recall"][0]
    assert told == pytest.approx(float(wanted), abs=2e-6)
    assert 0.3 < told < 1 - 1e-4


def test_step_recall_is_one_when_nothing_merges_or_goes() -> None:
    run = Synthetic(tc(budget_frames=60, threshold=1.01)).go(30)
    assert min(min(b["step_recall"]) for b in run.blocks()) >= 1 - 1e-5


# -- the report ------------------------------------------------------------------------------------------------------


def test_the_report_is_plain_data_per_block_and_layer() -> None:
    run = Synthetic(tc(budget_frames=8, threshold=0.8, quiet_heads=((1, 0), (1, 1))), batch=2).go(30)
    report = json.loads(json.dumps(run.run.report()))
    assert list(report["cache"]) == ["p"]
    blocks = report["cache"]["p"]["blocks"]
    assert [b["start"] for b in blocks] == list(range(0, 30, 3))
    last = blocks[-1]
    assert set(last) == {"start", "frames", "left_recent", "layers", "rows", "density", "bytes", "groups", "merged", "opened", "evicted",
                         "folded", "step_recall"}
    assert last["layers"] == [0], "no head of layer 1 keeps history"
    assert all(len(last[name]) == 1 for name in ("rows", "groups", "merged", "opened", "evicted", "folded", "step_recall"))
    assert last["rows"] == [8 * 6]
    assert last["merged"][0] + last["opened"][0] == 2 * 3 * 6
    full, bare = (8 + 3) * 6, (4 + 3) * 6
    assert last["density"] == pytest.approx((full + bare) / 2 / (33 * 6))
    assert last["bytes"] == run.policy.bytes() - run.policy.rotary.bytes()
    assert blocks[0]["step_recall"] == [pytest.approx(1, abs=1e-5)]


def test_a_run_without_any_history_reports_too() -> None:
    quiet = tuple((layer, head) for layer in range(2) for head in range(2))
    blocks = Synthetic(tc(budget_frames=8, quiet_heads=quiet)).go(12).blocks()
    assert blocks[-1]["layers"] == []
    assert blocks[-1]["groups"] == []
