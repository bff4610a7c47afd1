"""Limits of a back-end say in words why a call is not for it, and ops say what is wrong with their arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastar_pack.kernels import ops, tiles
from fastar_pack.kernels.constraints import Limits, Rule
from kernels.more_cases import CASES, Case

pytestmark = pytest.mark.cpu


def test_each_kind_of_limit_has_its_words() -> None:
    q = torch.empty(1, 3, 1, 16, device="meta")
    never = Rule("two heads", lambda call: False)
    everything = Limits("attend", devices=("cuda",), dtypes=(torch.float16,), rules=(never,))
    assert everything.why_not(q, q, q) == "it runs on cuda, the tensors are on meta"
    assert everything.words() == "on cuda; types float16; two heads"
    assert Limits("attend", not_devices=("meta",)).why_not(q, q, q) == "it does not run on meta"
    assert Limits("attend", dtypes=(torch.float16,)).why_not(q, q, q) == "it takes float16, the call has float32"
    assert Limits("attend", rules=(never,)).why_not(q, q, q) == "it wants two heads"
    assert Limits("attend").why_not(q, q, q) is None
    assert Limits("attend").words() == "no limits"


def test_rules_see_defaults_and_keywords() -> None:
    q = torch.empty(1, 3, 1, 16)
    biased = Limits("attend", rules=(Rule("a bias", lambda call: call["bias"] is not None),))
    assert biased.why_not(q, q, q) == "it wants a bias"
    assert biased.why_not(q, q, q, bias=torch.zeros(1, 1, 3)) is None
    assert biased.why_not(q=q, k=q, v=q, bias=torch.zeros(1, 1, 3)) is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_keeps_the_contract(case: Case) -> None:
    getattr(ops, case.op)(*case.args())


Q = torch.zeros(1, 3, 2, 16)
CODES = torch.zeros(1, 2, 3, dtype=torch.int32)
ROWS = torch.zeros(1, 2, 3, 16)
WRONG: list[tuple[str, tuple[Any, ...], str]] = [
    ("attend", (Q, Q[:, :, :1], Q), r"attend: k has shape \(1, 3, 1, 16\)"),
    ("attend", (Q, Q, Q.half()), "expected one dtype"),
    ("attend", (Q, Q, Q, torch.zeros(1, 2, 4)), "bias has shape"),
    ("attend", (Q, Q, Q, torch.zeros(1, 2, 3).half()), "bias is torch.float16"),
    ("attend", (Q, Q, Q, None, torch.zeros(1, 2)), "lengths is torch.float32"),
    ("hash_codes", (Q, None, torch.zeros(2, 16, 32)), "32 bits, expected 1 to 31"),
    ("hash_codes", (Q, torch.zeros(1, 3, 16), torch.zeros(2, 16, 3)), "mean has shape"),
    ("bucket_order", (CODES, 0), "0 buckets"),
    ("bucket_order", (CODES.long(), 4), "codes is torch.int64"),
    ("tile_table", (CODES, torch.zeros(1, 2, 3, 1, 2, dtype=torch.int32), 16, 3), "key_ranges has shape"),
    ("nearest", (ROWS, ROWS, None, "angle"), "metric 'angle', expected one of dot, cosine, l2"),
    ("nearest", (ROWS.to(torch.int8), ROWS.to(torch.int8)), "q_scale goes with int8 codes"),
    ("nearest_candidates", (ROWS, ROWS, torch.zeros(4, 2, dtype=torch.int32)), "candidates has shape"),
    ("compact", (ROWS, torch.zeros(1, 2, 3), torch.zeros(1, 2, 4, dtype=torch.int64), 5), "group has shape"),
    ("merge_lse", ([],), "no parts"),
    ("prompt_keep", (CODES, CODES[:, :1]), "k_codes has shape"),
]


@pytest.mark.parametrize(("op", "args", "words"), WRONG, ids=[f"{op}: {words}" for op, _, words in WRONG])
def test_wrong_arguments_are_named(op: str, args: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ops.ArgumentError, match=words):
        getattr(ops, op)(*args)


@pytest.mark.parametrize(("rows", "buckets", "tile"), [(0, 4, 16), (5, 9, 16), (100, 3, 16), (96, 1, 32), (7, 7, 1)])
def test_the_table_is_large_enough_for_the_worst_split(rows: int, buckets: int, tile: int) -> None:
    """All but one bucket as bad as can be: one row each, the rest in the last."""
    small = min(buckets - 1, rows)
    needed = small + -(-(rows - small) // tile)
    assert tiles.max_tiles(rows, buckets, tile) >= needed


def test_tiles_shrink_when_buckets_are_small() -> None:
    assert [tiles.good_tile_rows(4680, n) for n in (4, 8, 16, 32)] == [128, 128, 128, 64]
    assert [tiles.good_tile_rows(1560, n) for n in (4, 8)] == [128, 64]
