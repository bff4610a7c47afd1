"""Writes the example workflows from the nodes' own descriptions. Run from the tests folder with a host at hand:

    FASTAR_TEST_HOST=path/to/ComfyUI python -m workflows.build
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from tests_support import HOST_VARIABLE, PACK_ROOT, start_host
from workflows.describe import describe
from workflows.flows import FLOWS
from workflows.graph import Info

FOLDER = PACK_ROOT / "example_workflows"
BUILT_WITH = "0.3."  # newer hosts describe their own nodes a little differently and load these files as well


def build(info: Info) -> dict[str, str]:
    """Path below example_workflows -> text of the file, for every workflow in both forms."""
    files = {}
    for flow in FLOWS:
        graph = flow(info)
        files[f"{graph.name}.json"] = _text(graph.ui())
        files[f"api/{graph.name}.json"] = _text(graph.api())
    return files


def _text(data: object) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all files; the host is only asked about its nodes."""
    named = os.environ.get(HOST_VARIABLE)
    if not named:
        sys.exit(f"set {HOST_VARIABLE} to a ComfyUI checkout")
    with tempfile.TemporaryDirectory() as base:
        host = start_host(Path(named).expanduser().resolve(), Path(base))
        info = describe(host)
    if not host.version.startswith(BUILT_WITH):
        sys.exit(f"{named} is ComfyUI {host.version}; the files are built with {BUILT_WITH}x")
    for name, text in build(info).items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
        print(path.relative_to(PACK_ROOT))


if __name__ == "__main__":
    main()
