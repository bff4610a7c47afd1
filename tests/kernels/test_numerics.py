"""Errors of torch_fast do not grow with the number of keys, decisions agree between back-ends, wrong variants are noticed."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from fastar_pack.kernels import registry
from fastar_pack.kernels.torch_fast import fused
from fastar_pack.kernels.torch_fast import nearest as torch_nearest
from kernels.compare import TOLERANCE, different_bits, fault, relative_error, widened, with_lse
from kernels.more_cases import CASES, Case

pytestmark = pytest.mark.cpu


BACKEND = os.environ.get("FASTAR_KERNEL_BACKENDS", "torch_fast").split(",")[0]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # a thousand times slower: smaller problems
KEYS = (1024, 4096, 16384) if INTERPRETED else (1024, 8192, 65536)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16])
@pytest.mark.parametrize("most", [8, 750])
def test_the_error_does_not_grow_with_the_number_of_keys(dtype: torch.dtype, most: int) -> None:
    g = torch.Generator().manual_seed(3)
    errors = []
    for keys in KEYS:
        q, k, v = ((torch.randn(1, n, 1, 64, generator=g) * 2).to(dtype) for n in (16, keys, keys))
        bias = torch.randint(1, most + 1, (1, 1, keys), generator=g).float().log()
        exact = registry.call("attend", "reference", q.double(), k.double(), v.double(), bias)
        errors.append(relative_error(registry.call("attend", BACKEND, q, k, v, bias), exact))
    print(f"{BACKEND} {dtype}, counts up to {most}: " + ", ".join(f"{n} keys {e:.1e}" for n, e in zip(KEYS, errors)))
    assert max(errors) < TOLERANCE[dtype]
    assert errors[-1] < 4 * errors[0], "64 times the keys; the mean of more values is smaller beside the same rounding"


def decisions(backend: str, rows: int) -> dict[str, torch.Tensor]:
    """Hash bits, matches and kept keys of one back-end on tokens that resemble each other."""
    g = torch.Generator().manual_seed(5)
    base = torch.randn(1, 1, 3, 64, generator=g) * 2
    x, y = (base + torch.randn(1, n, 3, 64, generator=g) for n in (rows, rows * 3 // 4))
    planes = torch.randn(3, 64, 6, generator=g)
    codes = [registry.call("hash_codes", backend, t, base[:, 0], planes) for t in (x, y)]
    across = [t.transpose(1, 2).contiguous() for t in (x, y)]
    index, _ = registry.call("nearest", backend, *across, None, "cosine")
    return {"codes": codes[0], "index": index, "kept": registry.call("prompt_keep", backend, codes[0][..., :40], codes[1])}


def test_decisions_of_the_back_ends_agree() -> None:
    """At least 99.9 % of the hash bits, matches and keep decisions are equal; the share is printed."""
    one, other = (decisions(name, 200 if INTERPRETED else 1200) for name in (BACKEND, "reference"))
    bits = 1 - different_bits(one["codes"], other["codes"]) / (6 * one["codes"].numel())
    equal = {"hash bits": bits}
    equal |= {name: float((one[name] == other[name]).float().mean()) for name in ("index", "kept")}
    print(BACKEND, {name: f"{share:.5%}" for name, share in equal.items()})
    assert min(equal.values()) >= 0.999


def test_a_hash_code_does_not_depend_on_what_else_is_in_the_call() -> None:
    """Alone, in a batch, or in a slice: the same bits, also on the border (plane products near zero)."""
    g = torch.Generator().manual_seed(1)
    x, planes = torch.randn(3, 500, 4, 128, generator=g), torch.randn(4, 128, 16, generator=g)
    planes[..., 1] = planes[..., 0] + 1e-7 * torch.randn(4, 128, generator=g)
    mean = torch.randn(1, 4, 128, generator=g)
    whole = registry.call("hash_codes", "torch_fast", x, mean, planes)
    for b, part in ((0, slice(0, 1)), (1, slice(3, 74)), (2, slice(400, 500))):
        alone = registry.call("hash_codes", "torch_fast", x[b : b + 1, part], mean, planes)
        assert torch.equal(alone[0], whole[b, :, part])


def test_the_folded_sum_of_other_devices_is_the_same_hash() -> None:
    from fastar_pack.kernels.torch_fast.hash_codes import _folded

    g = torch.Generator().manual_seed(2)
    for dim in (1, 40, 128):
        rows, planes = torch.randn(2, 3, 50, dim, generator=g), torch.randn(3, dim, 5, generator=g)
        products = planes.transpose(1, 2)[None, :, None].double() * rows[..., None, :].double()
        assert relative_error(_folded(rows, planes), products.sum(-1)) < 1e-6


def merged_wrongly(parts: Any) -> Any:
    """Averages the parts instead of weighting them."""
    return sum(torch.where(out.isnan(), 0, out) for out, _ in parts) / len(parts), parts[0][1]


def shifted(result: Any) -> Any:
    return torch.roll(result[0], 1, -1), result[1]


def case(op: str, why: str) -> Case:
    return next(case for case in CASES if case.op == op and case.why.startswith(why))


def test_wrong_variants_fail() -> None:
    """What the comparison of the case table lets through: not these."""

    def judged(chosen: Case, got: Any) -> str | None:
        args = chosen.args()
        want = registry.call(chosen.op, "reference", *widened(args), **with_lse(chosen.op, args))
        return fault(chosen.op, args, got, want, TOLERANCE[torch.float32])

    attend = case("attend", "head dimension 128")
    q, k, v, bias = attend.args()
    run = registry.call
    assert judged(attend, run("attend", "torch_fast", q, k, v, bias, return_lse=True)) is None
    assert judged(attend, run("attend", "torch_fast", q, k, v, return_lse=True)), "the bias is left out"
    assert judged(attend, run("attend", "torch_fast", q, k, v, bias * 1.4427, return_lse=True)), "the bias in base 2"
    out, lse = run("attend", "torch_fast", q, k, v, bias, return_lse=True)
    assert judged(attend, (out, lse * 1.4427)), "the log sum in base 2"
    ranges = case("attend_ranges", "empty buckets")
    q, k, v, bias, order, tiles = ranges.args()
    in_order = torch.arange(order.shape[2], dtype=torch.int32).expand_as(order)
    assert judged(ranges, run("attend_ranges", "torch_fast", q, k, v, bias, in_order, tiles, return_lse=True))
    parts = case("merge_lse", "two parts")
    assert judged(parts, merged_wrongly(parts.args()[0]))
    for op, why in (("hash_codes", "four bits"), ("bucket_order", "several"), ("nearest", "dot"), ("compact", "dropped")):
        chosen = case(op, why)
        result = run(op, "torch_fast", *chosen.args())
        assert judged(chosen, result) is None
        wrong = torch.roll(result, 1, -1) if op == "hash_codes" else shifted(result)
        assert judged(chosen, wrong), op


def test_the_cpu_path_gives_minus_infinity_where_torch_gives_zero() -> None:
    """torch's own kernel answers 0 as the log sum of a row without keys, which would weigh an empty part like a full one."""
    q = torch.randn(1, 2, 3, 16)
    hidden = torch.full((1, 1, 4), -torch.inf)
    out, lse = fused.softmax_attention(q, torch.randn(1, 2, 4, 16), torch.randn(1, 2, 4, 16), hidden, True)
    assert out.abs().max() == 0
    assert lse is not None
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("metric", ["dot", "l2"])
@pytest.mark.parametrize("rows", [1, 5, 33])
def test_codes_are_found_alike_in_integers_and_in_floats(metric: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without an integer product on the CPU takes the other way, and must find the same."""
    generator = torch.Generator().manual_seed(3)
    q, keys = (torch.randint(-127, 128, (1, 2, n, 40), generator=generator, dtype=torch.int8) for n in (rows, 131))
    scales = [torch.rand(1, 2, n, generator=generator) + 0.5 for n in (rows, 131)]
    found = [torch_nearest.nearest(q, keys, None, metric, *scales)]
    monkeypatch.setattr(torch_nearest, "_integers_multiply", lambda: False)
    found.append(torch_nearest.nearest(q, keys, None, metric, *scales))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-4)
