"""Every back-end that runs here against the float64 reference and against each other, on the case table.

On a plain machine that is torch_fast; FASTAR_KERNEL_BACKENDS names others (Triton in its interpreter is a lane of its own).
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

from fastar_pack.kernels import registry
from kernels.compare import TOLERANCE, fault, widened, with_lse
from kernels.more_cases import CASES, Case

pytestmark = pytest.mark.cpu

BACKENDS = os.environ.get("FASTAR_KERNEL_BACKENDS", "torch_fast").split(",")
# Races never show in Triton's interpreter, which runs programs one after another: there this test would only cost time.
REPEATED = [name for name in BACKENDS if name != "triton" or os.environ.get("TRITON_INTERPRET") != "1"]
HALF = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALF)
RUNS = [
    pytest.param(case, dtype, id=f"{case.name} {str(dtype)[6:]}")
    for case in CASES
    for dtype in DTYPES
    if case.floating or dtype == torch.float32
    if not (case.wide and dtype == torch.float32)
]


def run(case: Case, backend: str, args: tuple[Any, ...]) -> Any:
    return registry.call(case.op, backend, *args, **with_lse(case.op, args))


def limit(dtype: torch.dtype, case: Case) -> float:
    return TOLERANCE[dtype if case.floating else torch.float32]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "dtype"), RUNS)
def test_a_back_end_equals_the_reference(case: Case, dtype: torch.dtype, backend: str, poisoned_memory: None) -> None:
    args = case.args(dtype)
    got = run(case, backend, args)
    want = run(case, "reference", widened(args))
    assert fault(case.op, args, got, want, limit(dtype, case)) is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_back_ends_equal_each_other(case: Case) -> None:
    names = [*BACKENDS, *(name for name in ("torch_fast", "reference") if name not in BACKENDS)]
    dtype = torch.float16 if case.wide else torch.float32
    args = case.args(dtype)
    results = {name: run(case, name, args) for name in names}
    for one, other in itertools.combinations(names, 2):
        problem = fault(case.op, args, results[one], results[other], limit(dtype, case))
        assert problem is None, f"{one} against {other}: {problem}"


@pytest.mark.parametrize("case", CASES if REPEATED else [], ids=lambda case: case.name)
@pytest.mark.parametrize("backend", REPEATED)
def test_the_same_call_gives_the_same_bits(case: Case, backend: str) -> None:
    dtype = torch.float16 if case.wide else torch.float32

    def flat(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        if hasattr(value, "tile_rows"):
            return [value.row_start, value.row_count, value.key_start, value.key_end]
        return [part for item in value for part in flat(item)]

    first, second = (flat(run(case, backend, case.args(dtype))) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert all(t.dtype in (torch.int32, torch.int64, torch.bool) or not t.isnan().any() for t in first)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", ["attend", "attend_ranges"])
def test_the_log_sum_does_not_change_the_result(op: str, backend: str) -> None:
    for case in (case for case in CASES if case.op == op and not case.wide):
        args = case.args()
        plain = registry.call(op, backend, *args)
        assert isinstance(plain, torch.Tensor)
        assert torch.allclose(plain, run(case, backend, args)[0], atol=1e-5)
