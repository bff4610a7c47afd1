"""The lanes for compiled kernels: what they set, and that without their packages they are skipped with a reason."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from run_parts import kernel_lanes, lanes, setup

pytestmark = pytest.mark.cpu


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> setup.Setup:
    setup.load_runner()
    from _runner.paths import Cache
    from _runner.talk import Talk

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    return setup.Setup(Cache(tmp_path), Talk(), Path(sys.executable), offline=True, fixed_python=True)


def put(made: setup.Setup, name: str, packages: tuple[str, ...]) -> Path:
    folder = made.cache.made("kernels", name)
    (folder / "fastar-stamp.txt").write_text("\n".join(packages), encoding="utf-8")
    return folder


def test_without_its_packages_a_lane_is_skipped(offline: setup.Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(setup.LaneSkippedError, match=r"triton==3\.8\.0 is not there, and --offline"):
        kernel_lanes.interpreter_environment(offline)
    put(offline, "triton-3.8.0", ("triton==3.7.0",))
    with pytest.raises(setup.LaneSkippedError, match="is not there"):
        kernel_lanes.compiler_environment("3.8.0")(offline)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    with pytest.raises(setup.LaneSkippedError, match="Linux on x86_64 only"):
        kernel_lanes.interpreter_environment(offline)


def test_what_the_lanes_set(offline: setup.Setup) -> None:
    folder = put(offline, "triton-3.8.0", ("triton==3.8.0",))
    environ = kernel_lanes.interpreter_environment(offline)
    assert environ["PYTHONPATH"] == str(folder)
    assert (environ["TRITON_INTERPRET"], environ["FASTAR_KERNEL_BACKENDS"]) == ("1", "triton")
    environ = kernel_lanes.compiler_environment("3.8.0")(offline)
    assert environ == {"FASTAR_LANE_KIND": "aot", "PYTHONPATH": str(folder)}


def test_flashinfer_needs_a_compiler(offline: setup.Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_lanes.shutil, "which", lambda name: None)
    with pytest.raises(setup.LaneSkippedError, match="needs nvcc"):
        kernel_lanes.flashinfer_environment(offline)


def test_their_test_files_exist() -> None:
    names = {"interpreter", "compiler-3.8.0", "compiler-3.6.0", "flashinfer"}
    found = [lane for lane in lanes.LANES if lane.name in names]
    assert len(found) == len(names)
    for lane in found:
        assert all((setup.ROOT / path).is_file() for path in lane.paths)
