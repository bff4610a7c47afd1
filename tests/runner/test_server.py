"""Starting and stopping a server, with stand-ins for ComfyUI: it is always stopped, whatever happens to the runner."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from _runner import cli, locate, provision, server, venv
from _runner.api import Api
from _runner.errors import Exit, RunnerError
from _runner.paths import WORKFLOWS, Cache
from _runner.talk import Talk

from runner.fake_host import DEAF, DIES, SERVES, make_host

pytestmark = pytest.mark.cpu


def prepared_host(folder: Path, main: str = SERVES, own: bool = False) -> provision.Prepared:
    python = locate.Python(Path(sys.executable), ())
    return provision.Prepared(make_host(folder, main), "0.3.80", python, own, ("--cpu",), folder / "output", "a test")


def answers(address: str) -> bool:
    return Api(address).answers()


def gone(address: str, seconds: float = 12.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not answers(address):
            return True
        time.sleep(0.1)
    return False


def test_a_server_runs_inside_the_with_block_only(tmp_path: Path, cache: Cache) -> None:
    with server.Server(prepared_host(tmp_path / "host"), cache, Talk(stream=io.StringIO())) as running:
        address = running.api.address
        assert running.alive
        assert running.api.version() == "0.3.80"
    assert not answers(address)
    arguments = json.loads((tmp_path / "host" / "started.json").read_text(encoding="utf-8"))["argv"]
    assert arguments[:2] == ["--listen", "127.0.0.1"]
    assert "--cpu" in arguments
    for option in ("--user-directory", "--temp-directory", "--database-url"):
        assert str(cache.root) in arguments[arguments.index(option) + 1].replace("sqlite:///", "")
    assert list((cache.root / "runs").iterdir()) == []
    assert "Starting server" in running.log.read_text(encoding="utf-8")


def test_what_a_stopped_run_kept_is_read_from_the_log(tmp_path: Path, cache: Cache) -> None:
    running = server.Server(prepared_host(tmp_path / "host"), cache, Talk(stream=io.StringIO()))
    assert running.kept() == ""
    lines = ["FAST-AR: run interrupted: 4 frames are safe in a.mp4", "x FAST-AR: run interrupted: 25 frames are safe in b.mp4 ", "end"]
    running.log.write_text("\n".join(lines), encoding="utf-8")
    assert running.kept() == "25 frames are safe in b.mp4"
    said = io.StringIO()
    cli._tell_kept(running, Talk(stream=said))
    cli._tell_kept(None, Talk(stream=said))
    assert said.getvalue() == "25 frames are safe in b.mp4\n"
    source = (WORKFLOWS.parent / "nodes" / "host" / "rescue.py").read_text(encoding="utf-8")
    assert "FAST-AR: run %s: %s" in source
    assert '"interrupted" if stopped' in source


def test_an_error_inside_stops_it(tmp_path: Path, cache: Cache) -> None:
    running = server.Server(prepared_host(tmp_path / "host"), cache, Talk(stream=io.StringIO()))

    def fail() -> None:
        with running:
            raise ValueError("anything")

    with pytest.raises(ValueError, match="anything"):
        fail()
    assert not answers(running.api.address)


def test_a_server_that_dies_at_once_shows_its_last_words(tmp_path: Path, cache: Cache) -> None:
    running = server.Server(prepared_host(tmp_path / "host", DIES), cache, Talk(stream=io.StringIO()))
    with pytest.raises(RunnerError, match="no module called torchsde") as caught, running:
        pass
    assert caught.value.code == Exit.SERVER
    assert str(running.log) in str(caught.value)


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "START_TIMEOUT_S", 1.0)
    running = server.Server(prepared_host(tmp_path / "host", DEAF), cache, Talk(stream=io.StringIO()))
    with pytest.raises(RunnerError, match="no answer within 1 s") as caught, running:
        pass
    assert caught.value.code == Exit.SERVER
    assert not running.alive


def test_a_taken_port_is_tried_again(tmp_path: Path, cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = "import sys; sys.exit('OSError: [Errno 98] address already in use')\n"
    first = f"import pathlib\nif not pathlib.Path('once').exists():\n    pathlib.Path('once').touch()\n    {taken}"
    with server.Server(prepared_host(tmp_path / "host", first + SERVES), cache, Talk(stream=io.StringIO())) as running:
        assert running.alive


@pytest.mark.parametrize("code", [0, 3])
def test_the_guard_hands_on_the_exit_code(code: int) -> None:
    """While its stdin is still open, as it is when pip or a server ends by itself."""
    command = [sys.executable, str(venv.GUARD), sys.executable, "-c", f"raise SystemExit({code})"]
    for _ in range(3):
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        assert child.stdin is not None
        assert child.stderr is not None
        assert child.wait(20) == code
        assert child.stderr.read() == b""
        child.stdin.close()
        child.stderr.close()


def test_old_logs_and_leftovers_go(tmp_path: Path, cache: Cache) -> None:
    old = cache.made("runs", "run-old")
    fresh = cache.made("runs", "run-fresh")
    os.utime(old, (0, 0))
    for number in range(15):
        log = cache.made("logs") / f"server-{number:02d}.log"
        log.touch()
        os.utime(log, (number, number))
    server.Server(prepared_host(tmp_path / "host"), cache, Talk(stream=io.StringIO())).stop()
    assert not old.exists()
    assert fresh.exists()
    assert sorted(path.stem for path in cache.logs.iterdir()) == [f"server-{number:02d}" for number in range(5, 15)]


DRIVER = """
import pathlib, runpy, sys, time
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from _runner import locate, provision, server, talk, paths, cli
import signal
signal.signal(signal.SIGTERM, cli._as_interrupt)
host = pathlib.Path(sys.argv[3])
prepared = provision.Prepared(host, "0", locate.Python(pathlib.Path(sys.executable), ()), False, (), host, "")
with server.Server(prepared, paths.Cache(host / "cache"), talk.Talk(json_mode=True)) as running:
    print(running.api.address, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that holds a server, and the server's address."""
    host = make_host(tmp_path / "host")
    workflows = str(Path(server.__file__).parents[1])
    command = [sys.executable, "-c", DRIVER, workflows, str(Path(__file__).parents[1]), str(host)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    address = child.stdout.readline().strip()
    assert answers(address)
    yield child, address
    child.kill()
    child.wait()
    child.stdout.close()


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX systems")
@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_the_server_ends_with_the_runner(driver: tuple[subprocess.Popen[str], str], number: str) -> None:
    child, address = driver
    os.kill(child.pid, getattr(signal, number))
    child.wait(20)
    assert gone(address)


def test_addresses_are_understood() -> None:
    assert Api("127.0.0.1:8188").address == "http://127.0.0.1:8188"
    assert Api("http://localhost/comfy/").base == "/comfy"
    secure = Api("https://localhost")
    assert (secure.port, secure.secure) == (443, True)
    for wrong in ("ftp://localhost", "http://", "http://localhost:port"):
        with pytest.raises(RunnerError, match="no server address") as caught:
            Api(wrong)
        assert caught.value.code == Exit.USAGE
