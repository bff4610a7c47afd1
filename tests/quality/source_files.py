"""Which files the checks of this folder look at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests_support import PACK_ROOT

CODE_FOLDERS = ("nodes", "fastar_core", "kernels", "example_workflows", "tests")
PACK_FOLDERS = ("nodes", "fastar_core", "kernels")
TEXT_ENDINGS = {
    ".py",
    ".md",
    ".json",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
    ".ini",
    ".js",
    ".mjs",
    ".css",
    ".html",
    ".sh",
    "",
}
_UNSEEN = {"__pycache__", ".git", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".venv", "venv", "node_modules"}


def _walk(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name in _UNSEEN or path.is_symlink():
            continue
        if path.is_dir():
            yield from _walk(path)
        else:
            yield path


def python_files(folders: tuple[str, ...] = CODE_FOLDERS) -> list[tuple[str, str]]:
    """(path relative to the pack root with forward slashes, text) of the root __init__.py and all .py in `folders`."""
    paths = [PACK_ROOT / "__init__.py"]
    for folder in folders:
        paths += [path for path in _walk(PACK_ROOT / folder) if path.suffix == ".py"]
    return [(path.relative_to(PACK_ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def text_files() -> list[tuple[str, str]]:
    """All text files of the pack as (relative path, text); large data files are left out."""
    found = []
    for path in _walk(PACK_ROOT):
        if path.suffix in TEXT_ENDINGS and path.stat().st_size < 1_000_000:
            found.append((path.relative_to(PACK_ROOT).as_posix(), path.read_text(encoding="utf-8")))
    return found
