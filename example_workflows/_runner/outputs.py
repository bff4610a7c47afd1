"""Finds the files a run left, copies them where the user wants them, and reads our sampler's report."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .api import Api, HttpError
from .errors import Exit, RunnerError
from .mp4 import video_frames
from .talk import Talk

VIDEOS = (".mp4", ".mov", ".mkv", ".webm")
REPORT = "fastar_report"


@dataclass(frozen=True)
class Output:
    """One file in the server's folders: type is output, temp or input."""

    filename: str
    subfolder: str
    type: str

    @property
    def query(self) -> dict[str, str]:
        return {"filename": self.filename, "subfolder": self.subfolder, "type": self.type}

    @property
    def is_video(self) -> bool:
        return Path(self.filename).suffix.lower() in VIDEOS


def find_outputs(history: dict[str, dict[str, Any]]) -> list[Output]:
    """All files named in the outputs of a history entry: kept files before previews, videos before the rest."""
    found: dict[Output, None] = {}
    for entries in history.values():
        for value in entries.values():
            for entry in value if isinstance(value, list) else []:
                if isinstance(entry, dict) and isinstance(entry.get("filename"), str):
                    output = Output(
                        entry["filename"], str(entry.get("subfolder") or ""), str(entry.get("type") or "output")
                    )
                    found[output] = None
    return sorted(found, key=lambda output: (output.type != "output", not output.is_video))


def find_report(history: dict[str, dict[str, Any]]) -> Any:
    """The report of our sampler: parsed JSON, a list when several samplers ran, None without one."""
    reports = []
    for entries in history.values():
        texts = entries.get(REPORT)
        for text in texts if isinstance(texts, list) else [texts]:
            if isinstance(text, str):
                try:
                    reports.append(json.loads(text))
                except ValueError:
                    reports.append(text)
    return reports[0] if len(reports) == 1 else reports or None


def check_target(target: Path | None) -> None:
    """Before the run: can the results be saved there? Raises RunnerError(USAGE)."""
    if target is None:
        return
    folder = target if is_folder(target) else target.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise RunnerError(Exit.USAGE, f"--output {target}: {folder} cannot be made: {reason}") from reason
    if not os.access(folder, os.W_OK):
        raise RunnerError(Exit.USAGE, f"--output {target}: {folder} cannot be written to; choose another folder")


def is_folder(target: Path) -> bool:
    """An existing folder, or a name without an ending."""
    return target.is_dir() or (not target.suffix and not target.is_file())


def save_outputs(outputs: list[Output], target: Path | None, local: Path | None, api: Api, talk: Talk) -> list[Path]:
    """Copy the results to `target`; returns where they lie.

    `local`: output folder of a server of our own, whose files are already on this disk. Temporary previews are taken
    only when nothing else came out. A single file name as target takes the first video, else the first file.
    """
    kept = [output for output in outputs if output.type == "output"] or outputs
    if not kept:
        raise RunnerError(
            Exit.NO_OUTPUT,
            "the run is done but left no file: the workflow has no node that saves one (e.g. Save Video)",
        )
    if target is None and local is None:
        for output in kept:
            place = "/".join(filter(None, (output.type, output.subfolder, output.filename)))
            talk.say(f"On the server: {place} (use --output to fetch it)")
        return []
    if target is not None and not is_folder(target):
        if len(kept) > 1:
            talk.say(f"The run left {len(kept)} files; {target} takes {kept[0].filename}. A folder would take all.")
        kept = kept[:1]
    saved = []
    for output in kept:
        there = _on_disk(output, local)
        if target is None and there is not None:
            saved.append(there)
            continue
        copy = _place(output, target)
        _fetch(output, there, copy, api)
        saved.append(copy)
    return saved


def _on_disk(output: Output, local: Path | None) -> Path | None:
    """The file in the output folder; temporary files of our own server vanish with it and must be copied."""
    if local is None or output.type != "output":
        return None
    path = local / output.subfolder / output.filename
    return path if path.is_file() else None


def _place(output: Output, target: Path | None) -> Path:
    if target is not None and not is_folder(target):
        return target
    folder = target if target is not None else Path.cwd()
    folder.mkdir(parents=True, exist_ok=True)
    name = Path(output.filename)
    place, number = folder / name.name, 1
    while place.exists():
        number += 1
        place = folder / f"{name.stem}_{number}{name.suffix}"
    return place


def _fetch(output: Output, there: Path | None, place: Path, api: Api) -> None:
    unfinished = place.with_name(place.name + ".part")
    try:
        if there is not None:
            shutil.copyfile(there, unfinished)
        else:
            api.download(output.query, unfinished)
        unfinished.replace(place)
    except (OSError, HttpError) as reason:
        unfinished.unlink(missing_ok=True)
        where = there or f"{output.type}/{output.subfolder}/{output.filename} on the server"
        raise RunnerError(Exit.NO_OUTPUT, f"{where} could not be saved as {place}: {reason}") from reason


def count_frames(saved: list[Path], report: Any) -> int | None:
    """Frames of the first video, else what the sampler's report says it delivered, else the number of files."""
    for path in saved:
        if path.suffix.lower() in (".mp4", ".mov") and (frames := video_frames(path)) is not None:
            return frames
    told = report.get("frames") if isinstance(report, dict) else None
    if isinstance(told, dict) and isinstance(told.get("delivered"), int):
        return int(told["delivered"])
    return len(saved) or None
