"""Sets up what the lanes need: our own host and Python through the runner's code, the newer host, the browser."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NEWER = (0, 27, 0)
PLAYWRIGHT = "1.64.1"
BROWSER_PACKAGES = ("chromium", "fonts-noto-core")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class LaneSkippedError(Exception):
    """A lane cannot run here; says why."""


def load_runner() -> ModuleType:
    """The package example_workflows/_runner under its own name, without touching the import path."""
    if "_runner" in sys.modules:
        return sys.modules["_runner"]
    folder = ROOT / "example_workflows" / "_runner"
    spec = importlib.util.spec_from_file_location(
        "_runner", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{folder} is no package")
    module = importlib.util.module_from_spec(spec)
    sys.modules["_runner"] = module
    spec.loader.exec_module(module)
    return module


@dataclass
class Setup:
    """Shared by the lanes: the cache, the interpreter with host and test packages, and what the user allowed."""

    cache: Any
    talk: Any
    python: Path
    offline: bool
    fixed_python: bool

    @classmethod
    def make(cls, python: Path | None, offline: bool) -> Setup:
        """Complete host and packages; raises the runner's RunnerError when that is not possible."""
        load_runner()
        from _runner import paths, pins, provision, talk

        cache = paths.Cache(paths.cache_folder())
        speaker = talk.Talk()
        wishes = provision.Wishes(python, offline)
        found = provision.set_up_own(cache, wishes, speaker, [pins.layer_for_tests()])
        return cls(cache, speaker, found.path, offline, python is not None)

    def host_environment(self) -> dict[str, str]:
        """For tests that import or start the 0.3.75 host."""
        return {"FASTAR_TEST_HOST": str(self.cache.host)}


def newer_host() -> Path:
    """A ComfyUI of at least NEWER: COMFYUI_PATH or ~/comfy/ComfyUI; raises LaneSkippedError without one."""
    load_runner()
    from _runner import locate

    tried = []
    for named in (os.environ.get("COMFYUI_PATH"), "~/comfy/ComfyUI"):
        if not named:
            continue
        folder = Path(named).expanduser().absolute()
        if not locate.is_comfyui(folder):
            tried.append(f"{folder} is no ComfyUI")
            continue
        version = locate.version_of(folder)
        if locate.version_numbers(version) >= NEWER:
            return folder
        tried.append(f"{folder} is {version}")
    raise LaneSkippedError(f"no ComfyUI 0.27 or newer: {'; '.join(tried)} (set COMFYUI_PATH to one)")


def newer_environment(setup: Setup) -> dict[str, str]:
    """For tests on the newer host, whose further packages are installed here."""
    from _runner import errors, pins, provision

    folder = newer_host()
    if not setup.fixed_python:
        layers = [pins.layer_for_tests(), pins.layer_for_newer_host()]
        try:
            provision.set_up_own(setup.cache, provision.Wishes(None, setup.offline), setup.talk, layers)
        except errors.RunnerError as reason:
            if not setup.offline:
                raise
            raise LaneSkippedError(str(reason)) from reason
    stubs = setup.cache.made("stubs", "torchaudio")
    (stubs / "__init__.py").write_text('"""Empty: the host imports torchaudio, no test uses it."""\n', encoding="utf-8")
    return {
        "FASTAR_TEST_HOST": str(folder),
        "FASTAR_TEST_HOST_27": str(folder),
        "PYTHONPATH": str(stubs.parent),
    }


def main_environment(setup: Setup) -> dict[str, str]:
    """For tests on the 0.3.75 host; those that compare it with a newer one find that too where there is one."""
    try:
        newer = newer_environment(setup)
    except LaneSkippedError:
        newer = {}
    return {**newer, **setup.host_environment()}


def browser_environment(setup: Setup) -> dict[str, str]:
    """For tests in a real browser; installs Chromium and playwright-core where that is possible."""
    if not any((ROOT / "tests" / "browser").glob("test_*.py")):
        raise LaneSkippedError("tests/browser holds no tests")
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None) or _install_chromium(setup)
    return {
        **setup.host_environment(),
        "FASTAR_CHROMIUM": chromium,
        "FASTAR_PLAYWRIGHT": str(_install_playwright(setup)),
    }


def _install_chromium(setup: Setup) -> str:
    """Debian's Chromium (and Node.js if that is missing, for playwright-core)."""
    why = "no Chromium on the PATH, and "
    if setup.offline:
        raise LaneSkippedError(why + "--offline")
    if sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("apt-get"):
        raise LaneSkippedError(why + "it is installed only by root on Debian-like systems")
    packages = [*BROWSER_PACKAGES, *(() if shutil.which("npm") else ("nodejs", "npm"))]
    setup.talk.say(f"Installing {', '.join(packages)} (about 250 MB) with apt-get for the browser tests.")
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(
            ["apt-get", "-q", *command],
            env=environ,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode != 0:
            raise LaneSkippedError(why + f"apt-get {command[0]} failed: {done.stderr.strip()[-300:]}")
    found = shutil.which("chromium")
    if found is None:
        raise LaneSkippedError(why + "apt-get brought none")
    return found


def _install_playwright(setup: Setup) -> Path:
    """The node_modules folder with playwright-core in it."""
    npm = shutil.which("npm")
    folder = setup.cache.made("playwright")
    package = folder / "node_modules" / "playwright-core" / "package.json"
    if package.is_file() and json.loads(package.read_text(encoding="utf-8")).get("version") == PLAYWRIGHT:
        return package.parents[1]
    if npm is None or setup.offline:
        raise LaneSkippedError(
            "no playwright-core, and " + ("--offline" if setup.offline else "no npm to install it with")
        )
    setup.talk.say(f"Installing playwright-core {PLAYWRIGHT} (5 MB, Apache-2.0) with npm for the browser tests.")
    command = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", f"playwright-core@{PLAYWRIGHT}"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise LaneSkippedError(f"npm could not install playwright-core: {done.stderr.strip()[-300:]}")
    return package.parents[1]
