"""tests/run.py itself: what it counts, what it passes on, when it fails."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from run_parts import lanes, setup
from runner.fake_host import make_host

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_all_tests", setup.ROOT / "tests" / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def report(tmp_path: Path, **counts: int) -> Path:
    path = tmp_path / "report.xml"
    numbers = " ".join(f'{name}="{value}"' for name, value in counts.items())
    path.write_text(f"<testsuites><testsuite {numbers}/></testsuites>", encoding="utf-8")
    return path


def test_results_are_counted(script: ModuleType, tmp_path: Path) -> None:
    path = report(tmp_path, tests=10, failures=1, errors=2, skipped=3)
    assert str(script.count_results(path, 1)) == "4 passed, 3 failed, 3 skipped"
    assert str(script.count_results(report(tmp_path, tests=5), 0)) == "5 passed, 0 failed, 0 skipped"


def test_a_run_that_broke_is_a_failure(script: ModuleType, tmp_path: Path) -> None:
    assert script.count_results(tmp_path / "none.xml", 3).failed == 1
    assert script.count_results(report(tmp_path, tests=5), 3).failed == 1
    assert script.count_results(tmp_path / "none.xml", 5).failed == 0


def options(script: ModuleType, *arguments: str) -> argparse.Namespace:
    return script.build_parser().parse_args(arguments)


def test_selectors_reach_pytest(script: ModuleType) -> None:
    lane = lanes.LANES[0]
    chosen = options(script, "-k", "websocket", "--fast", "--", "-x")
    command = script.pytest_command(lane, Path("python"), chosen, Path("r.xml"))
    assert command[-4:] == ["-k", "websocket", "-x", "tests"]
    assert "--ignore=tests/browser" in command
    assert all(f"--ignore={path}" in command for path in lane.slow)
    assert not any(
        f"--ignore={path}" in script.pytest_command(lane, Path("p"), options(script), Path("r")) for path in lane.slow
    )


def test_paths_of_the_table_exist() -> None:
    for lane in lanes.LANES:
        for path in (*lane.slow, *(path for path in lane.left_out if path != "tests/browser")):
            assert (setup.ROOT / path).exists(), path


def test_the_machines_variables_are_not_passed_on(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMFYUI_PATH", "x")
    monkeypatch.setenv("FASTAR_TEST_HOST_27", "x")
    environ = script.lane_environment({"FASTAR_TEST_HOST": "h", "PYTHONPATH": "stubs"}, lanes.LANES[0])
    assert "COMFYUI_PATH" not in environ
    assert "FASTAR_TEST_HOST_27" not in environ
    assert environ["FASTAR_TEST_HOST"] == "h"
    assert environ["PYTHONPATH"].split(os.pathsep)[-1] == "stubs"


def fake_setup(tmp_path: Path) -> setup.Setup:
    setup.load_runner()
    from _runner.paths import Cache
    from _runner.talk import Talk

    return setup.Setup(Cache(tmp_path / "cache"), Talk(), Path(sys.executable), offline=True, fixed_python=True)


def test_a_lane_that_cannot_run_is_skipped_with_its_reason(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(_: setup.Setup) -> dict[str, str]:
        raise setup.LaneSkippedError("there is no such host here")

    lane = lanes.Lane("x", "nothing", prepare, ("tests",))
    assert str(script.run_lane(lane, fake_setup(tmp_path), options(script))) == "0 passed, 0 failed, 1 skipped"
    assert "there is no such host here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("def test_a(): pass\n", 0, "1 passed, 0 failed, 0 skipped"),
        ("def test_a(): assert 0\ndef test_b(): pass\n", 1, "1 passed, 1 failed, 0 skipped"),
        ("import nothing_of_this_name\n", 1, "0 passed, 1 failed, 0 skipped"),
        ("x = 1\n", 1, "0 passed, 0 failed, 0 skipped"),
        ("import pytest\n@pytest.mark.skip\ndef test_a(): pass\n", 1, "0 passed, 0 failed, 1 skipped"),
    ],
)
def test_the_closing_line_and_the_exit_code(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    body: str, code: int, line: str,
) -> None:  # fmt: skip
    (tmp_path / "test_it.py").write_text(body, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    lane = lanes.Lane("only", "one file", lambda _: {}, (str(tmp_path / "test_it.py"),))
    monkeypatch.setattr(script, "LANES", (lane,))
    monkeypatch.setattr(setup.Setup, "make", classmethod(lambda cls, *_: fake_setup(tmp_path)))
    extra = ["--", "-c", str(tmp_path / "pytest.ini"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    assert script.main(extra) == code
    assert line in capfd.readouterr().out.splitlines()


def test_the_newer_host_is_found_by_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "expanduser", lambda path: tmp_path / str(path).replace("~", "home"))
    with pytest.raises(setup.LaneSkippedError, match="no ComfyUI 0.27"):
        setup.newer_host()
    old = make_host(tmp_path / "old", version="0.3.75")
    monkeypatch.setenv("COMFYUI_PATH", str(old))
    with pytest.raises(setup.LaneSkippedError, match=r"is 0\.3\.75"):
        setup.newer_host()
    new = make_host(tmp_path / "home" / "comfy" / "ComfyUI", version="0.27.0")
    assert setup.newer_host() == new


def test_the_main_lane_knows_both_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fake_setup(tmp_path)
    monkeypatch.setattr(Path, "expanduser", lambda path: tmp_path / "none")
    assert setup.main_environment(made) == {"FASTAR_TEST_HOST": str(made.cache.host)}
    new = make_host(tmp_path / "none", version="0.27.0")
    environ = setup.main_environment(made)
    assert (environ["FASTAR_TEST_HOST"], environ["FASTAR_TEST_HOST_27"]) == (str(made.cache.host), str(new))
    assert (Path(environ["PYTHONPATH"]) / "torchaudio" / "__init__.py").is_file()
    assert setup.newer_environment(made)["FASTAR_TEST_HOST"] == str(new)


def test_the_browser_is_not_installed_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup.shutil, "which", lambda name: None)
    with pytest.raises(setup.LaneSkippedError, match="--offline"):
        setup._install_chromium(fake_setup(tmp_path))
    with pytest.raises(setup.LaneSkippedError, match="--offline"):
        setup._install_playwright(fake_setup(tmp_path))
