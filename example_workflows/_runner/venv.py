"""Our own Python environment: built in layers, each recorded only when complete, rebuilt when one was interrupted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .errors import Exit, RunnerError
from .pins import Layer
from .talk import Talk, clock

STAMP = "fastar-stamp.json"
BUSY = "fastar-busy"
NEEDED_MB = 1800
GUARD = Path(__file__).with_name("guard.py")
# Settings of the user's shell that would send packages or imports somewhere else.
_UNWANTED = (
    "PIP_USER",
    "PIP_TARGET",
    "PIP_PREFIX",
    "PIP_REQUIRE_VIRTUALENV",
    "PYTHONPATH",
    "PYTHONHOME",
    "VIRTUAL_ENV",
)


def python_of(venv: Path, system: str = sys.platform) -> Path:
    """The interpreter of an environment, whether it exists or not."""
    return venv / "Scripts" / "python.exe" if system == "win32" else venv / "bin" / "python"


def clean_environment() -> dict[str, str]:
    """This process's environment without what would break another interpreter."""
    return {key: value for key, value in os.environ.items() if key not in _UNWANTED}


class Environment:
    """The environment in `folder` (or just `interpreter`, for its pip); pip's own words go to `log`."""

    def __init__(self, folder: Path, log: Path, talk: Talk, interpreter: Path | None = None) -> None:
        self.folder = folder
        self._interpreter = interpreter
        self.log = log
        self.talk = talk

    @property
    def python(self) -> Path:
        return self._interpreter or python_of(self.folder)

    def missing(self, layers: Sequence[Layer]) -> list[Layer]:
        """The layers that are not completely there; all of them when the environment has to be rebuilt."""
        done = self._done()
        if (self.folder / BUSY).exists() or not self.python.exists() or done.get(layers[0].name) != layers[0].digest:
            return list(layers)
        return [layer for layer in layers if done.get(layer.name) != layer.digest]

    def make(self, base: Layer) -> None:
        """Create the empty environment, unless a whole one with the layer `base` is there."""
        if self.missing([base]) == []:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        free_mb = shutil.disk_usage(self.folder.parent).free // 2**20
        if free_mb < NEEDED_MB:
            raise RunnerError(
                Exit.SETUP,
                f"{self.folder.parent} has {free_mb} MB free, the packages need at least {NEEDED_MB} MB. Make room, or "
                "set FASTAR_CACHE to a folder on another disk.",
            )
        self._run([sys.executable, "-m", "venv", str(self.folder)], "creating a Python environment", _VENV_HINT)
        self._mark()

    def install(self, layer: Layer, base: Layer) -> None:
        """Install one layer; other layers are held to the versions of `base`."""
        self._mark()
        held: list[str] = []
        if layer is not base:
            constraints = self.folder / "fastar-constraints.txt"
            constraints.write_text("\n".join([*base.plain, *base.bare]), encoding="utf-8")
            held = ["-c", str(constraints)]
        what = f"installing {layer.name} packages"
        if layer.plain:
            self.pip(["install", *held, *layer.plain], what)
        if layer.bare:
            self.pip(["install", "--no-deps", *layer.bare], what)
        stamp = self.folder / STAMP
        fresh = stamp.with_suffix(".part")
        fresh.write_text(json.dumps({**self._done(), layer.name: layer.digest}), encoding="utf-8")
        fresh.replace(stamp)
        (self.folder / BUSY).unlink()

    def pip(self, arguments: list[str], what: str) -> None:
        """Run this environment's pip with the user's own index settings."""
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
        self._run(command, what, _PIP_HINT)

    def spoil(self) -> None:
        """Make the next look find this environment incomplete, so that it is built anew."""
        if self.folder.is_dir():
            self._mark()

    def _done(self) -> dict[str, str]:
        try:
            read = json.loads((self.folder / STAMP).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return read if isinstance(read, dict) else {}

    def _mark(self) -> None:
        (self.folder / BUSY).write_text("an installation is under way or was interrupted\n", encoding="utf-8")

    def _run(self, command: list[str], what: str, hint: str) -> None:
        start = time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            log.write(f"\n> {' '.join(command)}\n".encode())
            log.flush()
            begin = log.tell()
            # Through the guard: an installation must not go on when this process was killed.
            child = subprocess.Popen(
                [sys.executable, str(GUARD), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=clean_environment(),
            )
            try:
                while child.poll() is None:
                    self.talk.bar(f"{what}: {clock(time.monotonic() - start)}")
                    time.sleep(0.2)
            finally:
                if child.stdin:
                    child.stdin.close()
                child.wait()
        if child.returncode != 0:
            raise RunnerError(Exit.SETUP, f"{what} failed: {_reason(self.log, begin)}\n{hint} All of it: {self.log}")
        self.talk.clear()


_VENV_HINT = "On Debian and Ubuntu the package python3-venv brings what is missing."
_PIP_HINT = (
    "Check the connection and pip's settings, then run again: what was downloaded is reused. Or set COMFYUI_PATH to a "
    "ComfyUI of your own."
)


def _reason(log: Path, begin: int) -> str:
    """The error lines of the last command in the log, else its last lines."""
    lines = log.read_bytes()[begin:].decode("utf-8", "replace").split("\n")
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if line.upper().startswith("ERROR")]
    return " / ".join((errors or lines)[-3:])[:1500] or "no output"
