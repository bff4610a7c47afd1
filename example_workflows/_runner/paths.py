"""Folders of the runner: the pack, its workflows, and the cache on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CACHE_VARIABLE = "FASTAR_CACHE"
# Not resolved: a pack that is linked into custom_nodes must be seen where the link lies.
WORKFLOWS = Path(os.path.abspath(__file__)).parents[1]  # noqa: PTH100 (absolute() keeps "..")
PACK_ROOT = WORKFLOWS.parent


def cache_folder(environ: Mapping[str, str] | None = None, system: str = sys.platform) -> Path:
    """FASTAR_CACHE, else this system's folder for caches; not created here."""
    environ = os.environ if environ is None else environ
    if named := environ.get(CACHE_VARIABLE):
        return Path(named).expanduser().absolute()
    home = Path.home()
    if system == "win32":
        return Path(environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "fast-ar"
    if system == "darwin":
        return home / "Library" / "Caches" / "fast-ar"
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "fast-ar"


@dataclass(frozen=True)
class Cache:
    """Where each thing lies inside the cache folder."""

    root: Path

    @property
    def host(self) -> Path:
        return self.root / "ComfyUI-0.3.75"

    @property
    def wheels(self) -> Path:
        return self.root / "wheels"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    def venv(self, python: tuple[int, int]) -> Path:
        """The environment for one Python version; several may lie side by side."""
        return self.root / f"venv-{python[0]}.{python[1]}"

    def made(self, *parts: str) -> Path:
        """A folder of this name below the cache, created when missing."""
        folder = self.root.joinpath(*parts)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
