"""One package set for each system and Python, chosen by rule."""

from __future__ import annotations

import itertools
import re

import pytest
from _runner.errors import Exit, RunnerError
from _runner.pins import EXACT, EXACT_BARE, PYTHONS, RANGES, SYSTEMS, host_layer, layer_for_newer_host, layer_for_tests

pytestmark = pytest.mark.cpu

MACHINES = {"Linux": ("x86_64", "aarch64"), "Darwin": ("arm64",), "Windows": ("AMD64",)}
GRID = [
    (system, machine, python) for system, python in itertools.product(SYSTEMS, PYTHONS) for machine in MACHINES[system]
]
HOST_NEEDS = {
    "torch",
    "torchvision",
    "av",
    "torchsde",
    "scipy",
    "requests",
    "sentencepiece",
    "psutil",
    "einops",
    "aiohttp",
}


def names(requirements: tuple[str, ...]) -> list[str]:
    return [re.split(r"[=<>]", requirement)[0] for requirement in requirements]


@pytest.mark.parametrize(("system", "machine", "python"), GRID)
def test_every_system_and_python_has_a_set(system: str, machine: str, python: tuple[int, int]) -> None:
    layer = host_layer(system, machine, python)
    assert layer.plain[0].startswith("torch"), "torch decides which builds of the others fit"
    assert set(names(layer.plain + layer.bare)) >= HOST_NEEDS | {"comfyui-frontend-package", "kornia", "transformers"}
    assert layer.download_mb > 0
    assert layer.licences


@pytest.mark.parametrize(("system", "machine", "python"), GRID)
def test_the_tested_pins_are_used_where_they_were_tested(system: str, machine: str, python: tuple[int, int]) -> None:
    layer = host_layer(system, machine, python)
    exact = (system, python) == ("Linux", (3, 11))
    assert (layer.plain == EXACT) is exact
    assert ("torchvision==0.16.2" in layer.bare) is exact
    if exact:
        assert layer.plain[0] == "torch==2.13.0"
        assert all("==" in requirement for requirement in layer.plain + layer.bare)
    else:
        assert any(requirement.startswith("torchvision>=") for requirement in layer.plain), "pip has to match the pair"


def test_torch_and_torchvision_ranges_hold_the_same_releases() -> None:
    """torchvision 0.(n + 15) belongs to torch 2.n."""
    found = dict(re.fullmatch(r"(\w+)>=([\d.]+),<([\d.]+)", entry).group(1, 2) for entry in RANGES[:2])
    ends = dict(re.fullmatch(r"(\w+)>=([\d.]+),<([\d.]+)", entry).group(1, 3) for entry in RANGES[:2])
    for bounds in (found, ends):
        assert int(bounds["torchvision"].split(".")[1]) - int(bounds["torch"].split(".")[1]) == 15


def test_the_exact_pins_lie_in_the_ranges() -> None:
    exact = dict(entry.split("==") for entry in EXACT if not entry.startswith("torch=="))
    for entry in RANGES:
        if match := re.fullmatch(r"([\w-]+)>=([\d.]+),<([\d.]+)", entry):
            name, low, high = match.groups()
            if name in exact:
                assert key(low) <= key(exact[name]) < key(high), entry


def key(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


@pytest.mark.parametrize(
    ("system", "machine", "python", "word"),
    [
        ("Linux", "x86_64", (3, 9), "3.10 to 3.14"),
        ("Linux", "x86_64", (3, 15), "3.10 to 3.14"),
        ("Darwin", "x86_64", (3, 11), "Intel"),
        ("FreeBSD", "amd64", (3, 11), "FreeBSD"),
    ],
)
def test_what_cannot_work_is_said(system: str, machine: str, python: tuple[int, int], word: str) -> None:
    with pytest.raises(RunnerError, match=word) as caught:
        host_layer(system, machine, python)
    assert caught.value.code == Exit.SETUP
    assert "COMFYUI_PATH" in str(caught.value)


def test_the_digest_tells_sets_apart() -> None:
    digests = {host_layer(*place).digest for place in GRID} | {layer_for_tests().digest, layer_for_newer_host().digest}
    assert len(digests) == 4


def test_further_layers_do_not_change_the_versions_of_the_first() -> None:
    first = set(names(EXACT + EXACT_BARE))
    assert not first & set(names(layer_for_tests().plain + layer_for_newer_host().plain))
