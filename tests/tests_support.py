"""What tests and scripts share: loading the pack as a package, as the host does, and starting a host in process."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

PACK_ROOT = Path(__file__).resolve().parents[1]
ALIAS = "fastar_pack"
HOST_VARIABLE = "FASTAR_TEST_HOST"


@dataclass(frozen=True)
class Host:
    """A ComfyUI that was imported into this process; `nodes` holds our node classes by id, loaded inside it."""

    path: Path
    version: str
    base: Path  # its input, output, temp, user and models folders lie here, not in the installation
    nodes: dict[str, type]


def load_pack(name: str = ALIAS, root: Path = PACK_ROOT) -> ModuleType:
    """Import the folder `root` as a package called `name` (any identifier); a second call returns the same module."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, root / "__init__.py", submodule_search_locations=[str(root)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{root} is not a package: expected an __init__.py in it")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def start_host(path: Path, base: Path) -> Host:
    """Import the ComfyUI checkout at `path` on the CPU with `base` (an existing folder) for everything it writes.

    One host per process. The installation itself is not written to. Raises what the host's import raises.
    """
    argv, cwd = sys.argv, Path.cwd()
    sys.path.insert(0, str(path))
    for folder in ("input", "output", "temp", "user", "models", "custom_nodes"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    try:
        os.chdir(path)
        sys.argv = ["main.py", "--cpu", "--base-directory", str(base)]
        importlib.import_module("comfy.options").enable_args_parsing()
        importlib.import_module("comfy.sd")
        importlib.import_module("nodes")
    finally:
        sys.argv = argv
        os.chdir(cwd)
    pack = load_pack()
    importlib.import_module(f"{pack.__name__}.nodes.host.folders").register_demo_models()
    classes, _ = importlib.import_module(f"{pack.__name__}.nodes").collect_nodes()
    version = importlib.import_module("comfyui_version").__version__
    return Host(path, version, base, classes)


def marker_faults(marks_by_test: dict[str, set[str]]) -> list[str]:
    """One line per test that does not carry exactly one of the markers cpu, gpu, manual."""
    kinds = {"cpu", "gpu", "manual"}
    return [
        f"{test}: has {sorted(marks & kinds) or 'none'} of the markers cpu, gpu, manual; exactly one is needed"
        for test, marks in marks_by_test.items()
        if len(marks & kinds) != 1
    ]
