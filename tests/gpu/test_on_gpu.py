"""On a machine with a GPU, pytest runs the checks of gpu_check.py as well."""

from __future__ import annotations

import pytest
import torch

from gpu import correct
from kernels.more_cases import CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("op", sorted({case.op for case in CASES}))
def test_every_op_against_float64(op: str) -> None:
    device = torch.device("cuda")
    place = correct.Place(device, correct.backends_for(device), seed=3)
    chosen = [case for case in [*CASES, *correct.large_cases(4680, 9000, 4, 128)] if case.op == op]
    assert [row for row in correct.check(place, chosen) if row["fault"]] == []
