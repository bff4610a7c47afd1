"""Measures: `python tests/bench.py NAME [--json FILE] [options of the bench]`. Without a name it lists them.

Every bench is a module tests/bench/<name>.py with run(arguments, say) -> {name, machine, gate, rows, targets}: it checks itself
first (the gate), prints no figure before that is green, and names every target, also those that cannot be measured here. With a
red gate the result holds nothing but the rows of the check.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests_support import load_pack

load_pack()

FOLDER = Path(__file__).with_name("bench")
Result = dict[str, Any]
Say = Callable[[str], None]


def benches() -> dict[str, str]:
    """Name -> first line of the description, of every module in the folder that is a bench."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "\ndef run(arguments" in text:
            found[path.stem] = text.lstrip('"').splitlines()[0].removeprefix(f"`python tests/bench.py {path.stem}`: ")
    return found


def machine() -> str:
    """The device, how many threads, and torch, in a few words."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def guarded(result: Result) -> Result:
    """The result as it may be shown: with a red gate only the rows of the check, and targets as not measured."""
    result = {**result, "machine": machine()}
    if result["gate"] == "green":
        return result
    reason = "the correctness check of this run is red"
    targets = [{**target, "value": None, "holds": None, "reason": reason} for target in result["targets"]]
    return {**result, "rows": [row for row in result["rows"] if "check" in row], "targets": targets}


def in_words(result: Result) -> str:
    """Machine, gate and targets."""
    lines = [f"\n{result['name']} on {result['machine']}: gate {result['gate']}"]
    if result["gate"] != "green":
        lines += [f"  {row}" for row in result["rows"]]
    for target in result["targets"]:
        value = target["value"]
        shown = "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
        state = {True: "holds", False: "MISSED", None: f"not measured: {target['reason']}"}[target["holds"]]
        lines.append(f"  {target['name']}: {shown} (target {target['target']}) {state}")
    return "\n".join(lines)


def run_one(name: str, arguments: list[str], say: Say = print) -> Result:
    """Runs a bench and returns what may be shown of it."""
    result = guarded(importlib.import_module(f"bench.{name}").run(arguments, say))
    say(in_words(result))
    return result


def main(arguments: list[str] | None = None) -> int:
    """0 = the gate is green (a missed target is a finding, not a failure)."""
    known = benches()
    listed = "\n".join(f"  {name:<12}{what}" for name, what in known.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"benches:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=list(known), help="which bench; none lists them")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    given, rest = parser.parse_known_args(arguments)
    if given.name is None:
        parser.print_help()
        return 0
    result = run_one(given.name, rest, lambda text: print(text, flush=True))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 0 if result["gate"] == "green" else 1


if __name__ == "__main__":
    sys.exit(main())
