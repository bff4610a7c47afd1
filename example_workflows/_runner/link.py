"""Makes the pack visible to a host without touching the host's folder: a linked folder named by an extra paths file."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

NAME = "ComfyUI-FAST-AR"
_NOT_COPIED = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "tests", "node_modules", "venv", ".venv")


def _is_link(path: Path) -> bool:
    junction = getattr(os.path, "isjunction", None)
    if junction is None and sys.platform == "win32":
        junction = _is_reparse_point
    return path.is_symlink() or bool(junction and junction(path))


def _is_reparse_point(path: Path) -> bool:
    try:
        return bool(getattr(os.lstat(path), "st_reparse_tag", 0))
    except OSError:
        return False


def remove_link(path: Path) -> None:
    """Remove a link, junction or copy at `path` and never what a link points at."""
    if path.is_symlink():
        path.unlink()
    elif _is_link(path):
        path.rmdir()
    elif path.is_dir():
        shutil.rmtree(path)


def link_folder(target: Path, path: Path) -> str:
    """Make `path` show the folder `target`; returns how: 'link', 'junction' or 'copy' (made anew each time)."""
    if _is_link(path) and path.resolve() == target.resolve():
        return "link"
    remove_link(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.symlink_to(target.resolve(), target_is_directory=True)
    except OSError:
        if sys.platform == "win32" and _junction(target.resolve(), path):
            return "junction"
        shutil.copytree(target, path, ignore=_NOT_COPIED)
        return "copy"
    return "link"


def _junction(target: Path, path: Path) -> bool:
    """A Windows junction needs no rights of an administrator, unlike a link there."""
    command = ["cmd", "/c", "mklink", "/J", str(path), str(target)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0 and path.exists()


def extra_paths(pack: Path, folder: Path) -> Path:
    """Write the file for --extra-model-paths-config that adds `pack` to a host's custom_nodes.

    `folder` is the place for links; every copy of the pack on this machine gets its own folder below it.
    """
    key = hashlib.sha256(str(pack.resolve()).encode()).hexdigest()[:12]
    place = folder / key
    link_folder(pack, place / "custom_nodes" / NAME)
    config = place / "extra_paths.yaml"
    # Relative to the file itself, so that nothing in this machine's folder names has to be quoted.
    config.write_text('fastar:\n    custom_nodes: "custom_nodes"\n', encoding="utf-8")
    return config
