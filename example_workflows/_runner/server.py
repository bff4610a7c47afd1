"""Starts a ComfyUI server on a free port of this machine and always stops it again."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from .api import Api
from .errors import Exit, RunnerError
from .guard import GRACE_S
from .paths import Cache
from .provision import Prepared
from .talk import Talk, clock
from .venv import GUARD, clean_environment

START_TIMEOUT_S = 300.0
STOPPED = "FAST-AR: run interrupted: "  # how nodes/host/rescue.py begins its line in the log
_ATTEMPTS = 3
_KEPT_LOGS = 10
_FORGOTTEN_S = 2 * 86400.0
_LISTEN = "127.0.0.1"
_NEW_PROCESS_GROUP = 0x00000200  # Windows' CREATE_NEW_PROCESS_GROUP, which other systems' subprocess lacks


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind((_LISTEN, 0))
        return int(probe.getsockname()[1])


class Server:
    """A server of our own; use as a context manager. Its log and the folder for what it writes lie in the cache."""

    def __init__(self, prepared: Prepared, cache: Cache, talk: Talk, environ: Mapping[str, str] | None = None) -> None:
        self.prepared = prepared
        self.api = Api(f"http://{_LISTEN}:1")
        self._environ = environ or {}
        self._talk = talk
        self._child: subprocess.Popen[bytes] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="run-", dir=cache.made("runs")))
        self.log = cache.made("logs") / f"server-{self._folder.name}.log"
        _forget_old(cache)

    def __enter__(self) -> Server:  # noqa: PYI034 (Self is not in Python 3.10)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def stop(self) -> None:
        """End the server, at the latest after twice its grace time, and remove its folder."""
        child, self._child = self._child, None
        if child is not None:
            if child.stdin:
                with contextlib.suppress(OSError):
                    child.stdin.close()
            try:
                child.wait(2 * GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def last_words(self, lines: int = 12) -> str:
        """The end of the server's log."""
        return "\n".join("  " + line for line in self._log_lines()[-lines:])

    def kept(self) -> str:
        """What our sampler says about the files of a run that was stopped; empty when it says nothing."""
        told = [line.partition(STOPPED)[2] for line in self._log_lines() if STOPPED in line]
        return told[-1].strip() if told else ""

    def _log_lines(self) -> list[str]:
        try:
            return self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []

    def _start(self) -> None:
        begin = time.monotonic()
        for attempt in range(_ATTEMPTS):
            port = free_port()
            self._launch(port)
            self.api = Api(f"http://{_LISTEN}:{port}")
            if self._wait(begin):
                self._talk.clear()
                return
            words = self.last_words()
            in_use = "address already in use" in words.lower() or "10048" in words
            if in_use and attempt + 1 < _ATTEMPTS:
                continue
            raise RunnerError(
                Exit.SERVER, f"ComfyUI in {self.prepared.path} ended while starting:\n{words}\nAll of it: {self.log}"
            )

    def _launch(self, port: int) -> None:
        for name in ("temp", "user"):
            (self._folder / name).mkdir(exist_ok=True)
        database = (self._folder / "user" / "comfyui.db").as_posix()
        command = [str(self.prepared.python.path), "-u", "main.py", "--listen", _LISTEN, "--port", str(port)]
        command += ["--disable-auto-launch", "--user-directory", str(self._folder / "user")]
        command += ["--temp-directory", str(self._folder), "--database-url", f"sqlite:///{database}"]
        command += self.prepared.arguments
        environ = clean_environment() if self.prepared.own else dict(os.environ)
        if not self.prepared.own:
            environ["PYTHONDONTWRITEBYTECODE"] = "1"  # nothing is written into a user's installation
        environ |= {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8", **self._environ}
        # A group of its own: Ctrl-C in the terminal reaches us alone, and we stop the server in order.
        windows = sys.platform == "win32"
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, str(GUARD), *command],
                cwd=self.prepared.path,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=not windows,
                creationflags=_NEW_PROCESS_GROUP if windows else 0,
            )

    def _wait(self, begin: float) -> bool:
        """True when the server answers, False when it ended."""
        while self.alive:
            if self.api.answers():
                return True
            waited = time.monotonic() - begin
            if waited > START_TIMEOUT_S:
                raise RunnerError(
                    Exit.SERVER,
                    f"ComfyUI in {self.prepared.path} gave no answer within {clock(START_TIMEOUT_S)}:\n"
                    f"{self.last_words()}\nAll of it: {self.log}",
                )
            self._talk.bar(f"starting ComfyUI {self.prepared.version}: {clock(waited)}")
            time.sleep(0.2)
        return False


def _forget_old(cache: Cache) -> None:
    """Remove all but the newest logs, and what killed runs left."""
    for path in sorted(cache.logs.glob("server-*.log"), key=os.path.getmtime)[:-_KEPT_LOGS]:
        with contextlib.suppress(OSError):
            path.unlink()
    for folder in cache.made("runs").glob("run-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _FORGOTTEN_S:
                shutil.rmtree(folder, ignore_errors=True)
