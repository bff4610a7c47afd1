"""What launches of the Triton kernels ask of the compiler: few specialisations over a run, and those that are checked.

Part of the lane that compiles ahead of time: it needs Triton without its interpreter.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if os.environ.get("FASTAR_LANE_KIND") != "aot":
    pytest.skip("needs Triton, without its interpreter: a lane of its own", allow_module_level=True)

from fastar_pack.kernels.torch_fast.bucket_order import bucket_order
from fastar_pack.kernels.torch_fast.tile_table import tile_table
from fastar_pack.kernels.triton import (
    attend,
    attend_ranges,
    compact,
    hash_codes,
    merge_lse,
    nearest,
    nearest_candidates,
    prompt_keep,
)
from fastar_pack.kernels.triton import bucket_order as triton_order
from fastar_pack.kernels.triton import tile_table as triton_table
from kernels import variants
from kernels.dry import launches

pytestmark = pytest.mark.cpu

HEADS, DIM, CAPACITY, ROWS = 2, 128, 3000, 312


def block(cached: int, bias_at: int, density: int) -> None:
    """One attention call of each kind over the first ``cached`` rows of a cache of fixed capacity."""
    q = torch.zeros(1, ROWS, HEADS, DIM, dtype=torch.bfloat16)
    cache = torch.zeros(2, 1, CAPACITY, HEADS, DIM, dtype=torch.bfloat16)
    k, v = cache[:, :, :cached]
    bias = torch.zeros(1, HEADS, CAPACITY + 8)[..., bias_at : bias_at + cached]
    lengths = torch.full((1, HEADS), cached, dtype=torch.int32)
    planes = torch.zeros(HEADS, DIM, 3)
    codes = torch.zeros(1, HEADS, ROWS, dtype=torch.int32)
    codes[..., : ROWS // 2] = 1
    order, offsets = bucket_order(codes, 8)
    spans = torch.tensor([[0, cached // density], [cached // 2, cached // 2 + density]], dtype=torch.int32)
    ranges = spans.expand(1, HEADS, 8, 2, 2).contiguous()
    hash_codes.hash_codes(q, None, planes)
    triton_order.bucket_order(codes, 8)
    triton_table.tile_table(offsets, ranges, 128, ROWS)
    attend.attend(q, k, v, bias, lengths, return_lse=True)
    attend_ranges.attend_ranges(q, k, v, bias, order, tile_table(offsets, ranges, 128, ROWS), return_lse=True)


def upkeep(rows: int, keys: int) -> None:
    """One compaction: search, merge, pruning, for changing numbers of rows."""
    x = torch.zeros(1, HEADS, rows, DIM, dtype=torch.bfloat16)
    pool = torch.zeros(1, HEADS, CAPACITY, DIM, dtype=torch.bfloat16)[:, :, :keys]
    valid = torch.ones(1, HEADS, keys, dtype=torch.bool)
    nearest.nearest(x, pool, valid, "cosine")
    nearest_candidates.nearest_candidates(x, pool, torch.zeros(rows, 9, dtype=torch.int32), valid, "cosine")
    compact.compact(x, torch.ones(1, HEADS, rows), torch.zeros(1, HEADS, rows, dtype=torch.int64), keys)
    out = torch.zeros(1, rows, HEADS, DIM, dtype=torch.bfloat16)
    merge_lse.merge_lse([(out, torch.zeros(1, HEADS, rows))] * 2)
    codes = torch.zeros(1, HEADS, rows, dtype=torch.int32)
    prompt_keep.prompt_keep(codes, codes[..., : keys % 97 + 1])


def keys_by_kernel(found: list[SimpleNamespace]) -> dict[str, int]:
    return {name: len({launch.key for launch in found if launch.name == name}) for name in {f.name for f in found}}


def test_a_run_compiles_each_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over lengths (odd, even, multiples of 16), densities and offsets of the bias: one form per kernel, dense and ranged."""
    with launches(monkeypatch) as found:
        for cached, bias_at, density in ((1000, 0, 1), (1001, 1, 2), (1536, 4, 4), (2047, 3, 8), (2999, 7, 16), (17, 2, 1)):
            block(cached, bias_at, density)
        for rows, keys in ((312, 1000), (313, 1001), (640, 2999), (17, 33)):
            upkeep(rows, keys)
    counts = keys_by_kernel(found)
    assert counts.pop("attend_kernel") == 2
    assert set(counts.values()) == {1}
    assert set(counts) == {
        "hash_kernel", "count_kernel", "place_kernel", "table_kernel", "nearest_kernel", "candidates_kernel", "means_kernel",
        "merge_kernel", "keep_kernel",
    }  # fmt: skip


def test_a_sparse_call_takes_few_extra_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash, two for the order, the table; the attention itself replaces the dense call."""
    from bench.kernels import LAUNCHES, extra_launches

    with launches(monkeypatch) as found:
        block(1536, 0, 4)
    extra = [launch.name for launch in found if launch.name != "attend_kernel"]
    assert len(extra) == extra_launches() <= LAUNCHES


def test_another_head_dimension_is_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count above can differ from one: it is no constant of the harness."""
    with launches(monkeypatch) as found:
        for dim in (64, 128):
            q = torch.zeros(1, 40, HEADS, dim, dtype=torch.bfloat16)
            attend.attend(q, q, q)
    assert keys_by_kernel(found) == {"attend_kernel": 2}


def test_what_is_compiled_ahead_of_time_is_what_calls_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with launches(monkeypatch) as found:
        block(1536, 0, 2)
        upkeep(320, 1536)
    checked: dict[str, list[Any]] = {}
    for variant in (*variants.every_kernel("sm_90"), variants.attend("sm_90", ranged=False)):
        checked.setdefault(variant.kernel.fn.__name__, []).append(variant)
    for launch in found:
        real = {name: kind for name, kind in launch.types.items() if kind != "constexpr"}
        forms = [dict(v.types) for v in checked[launch.name]]
        if launch.name == "attend_kernel":
            forms = [form | ({"lengths": "*i32"} if "lengths" in real else {}) for form in forms]
        if launch.name == "hash_kernel":
            forms = [{name: kind for name, kind in form.items() if name != "mean"} for form in forms]
        assert real in forms, launch.name
