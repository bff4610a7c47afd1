"""The command line of run.py."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from .errors import MEANING
from .graph import DEFAULT
from .paths import CACHE_VARIABLE

_EPILOG = f"""
which ComfyUI: a server named by --host; else the folder in the variable COMFYUI_PATH; else the ComfyUI whose
custom_nodes holds this pack; else ComfyUI 0.3.75, which is downloaded once into a cache folder ({CACHE_VARIABLE}
names another one). A ComfyUI of your own is started as it is and never changed.

exit codes:
""" + "\n".join(f"  {int(code):2d}  {meaning}" for code, meaning in MEANING.items())


@dataclass(frozen=True)
class Options:
    """What the user asked for; see build_parser for the meanings."""

    workflow: str
    settings: list[str]
    frames: int | None
    seed: int | None
    output: Path | None
    host: str | None
    python: Path | None
    timeout: float | None
    json: bool
    list: bool
    offline: bool


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is below {least}")
    return value


def _positive(text: str) -> int:
    return _whole(text, 1)


def _not_negative(text: str) -> int:
    return _whole(text, 0)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no number") from None
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _path(text: str) -> Path:
    return Path(text).expanduser()


def build_parser() -> argparse.ArgumentParser:
    """All options of run.py."""
    parser = argparse.ArgumentParser(
        prog="run.py",
        description="Runs a workflow of this pack on a real ComfyUI and saves the video. Without arguments: sets up "
        "what is missing and makes the demo video.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "workflow", nargs="?", default=DEFAULT, help=f"a name from --list or a file, UI or API form (default {DEFAULT})"
    )
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="NODE.INPUT=VALUE",
        help="change an input; NODE is a node's number, class or title; may be repeated",
    )  # fmt: skip
    parser.add_argument("--frames", type=_positive, metavar="N", help="length of the video in pixel frames")
    parser.add_argument("--seed", type=_not_negative, metavar="N", help="seed of all samplers")
    parser.add_argument(
        "--output", type=_path, metavar="PATH", help="file or folder for the result (default: where the server puts it)"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--host", metavar="URL", help="use this running server, e.g. http://127.0.0.1:8188")
    where.add_argument("--python", type=_path, metavar="PATH", help="the interpreter to start ComfyUI with")
    parser.add_argument("--offline", action="store_true", help="never download; say what is missing instead")
    parser.add_argument("--timeout", type=_seconds, metavar="SECONDS", help="stop a run that takes longer")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last thing on stdout, all else on stderr"
    )
    parser.add_argument("--list", action="store_true", help="list the workflows that come with the pack")
    return parser


def parse(arguments: list[str] | None = None) -> Options:
    """Read the command line; argparse ends the process with code 2 when it is wrong."""
    return Options(**vars(build_parser().parse_args(arguments)))
