"""Every Triton kernel compiles for every target, without spills, within its shared memory, with the matrix instructions expected.

A lane of its own (Triton, no interpreter, no GPU). FASTAR_AOT=all adds further dtypes, head dimensions and tile shapes.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest

if os.environ.get("FASTAR_LANE_KIND") != "aot":
    pytest.skip("compiles Triton kernels ahead of time: a lane of its own", allow_module_level=True)

from fastar_pack.kernels.triton.shapes import SHARED_LIMIT, Shape
from kernels import variants
from kernels.aot import NEWEST, Built, Variant, build

pytestmark = pytest.mark.cpu

EVERYTHING = os.environ.get("FASTAR_AOT") == "all"
# One target for the further forms is enough for every day: they differ in shape, not in code.
FURTHER = variants.TARGETS if EVERYTHING else ("sm_90",)
def chosen_variants(arch: str) -> list[Variant]:
    return variants.every_kernel(arch) + (variants.further(arch) if arch in FURTHER else [])


JOBS = [(arch, number) for arch in variants.TARGETS for number in range(len(chosen_variants(arch)))]


def variant(arch: str, number: int) -> Variant:
    return chosen_variants(arch)[number]


def compile_one(arch: str, number: int) -> Built:
    return build(variant(arch, number), arch)


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, int], Future[Built]]]:
    """All builds, started at once in a few processes with an empty cache."""
    os.environ["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    workers = max(1, min(4, os.cpu_count() or 1))
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield {job: pool.submit(compile_one, *job) for job in JOBS}


@pytest.mark.parametrize(("arch", "number"), JOBS, ids=[f"{arch} {variant(arch, n).name}" for arch, n in JOBS])
def test_it_compiles_and_fits(arch: str, number: int, builds: dict[tuple[str, int], Future[Built]]) -> None:
    built = builds[arch, number].result()
    assert (built.spills, built.stack) == (0, 0)
    assert built.shared <= SHARED_LIMIT[arch]
    chosen = variant(arch, number)
    if chosen.matrix:
        assert built.matrix > 0, "the products are not on the matrix units"
    if arch in NEWEST and "attend ranges bf16 d128 128x" in chosen.name:
        assert built.newest > 0, "the products do not use the newest matrix instructions"
    if "desc" in chosen.name:
        assert built.descriptor_loads > 0


def test_a_tile_that_is_too_large_is_noticed() -> None:
    """What the checks above look at does change: 128 x 128 tiles of 4 warps spill, and take more than sm_89 has."""
    built = build(variants.attend("sm_89", shape=Shape(128, 128, 4, 3, "ieee")), "sm_89")
    assert built.spills > 0
    assert built.shared > SHARED_LIMIT["sm_89"]
