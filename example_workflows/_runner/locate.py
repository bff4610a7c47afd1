"""Finds the ComfyUI to run on and an interpreter that can run it. Nothing here writes anywhere."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import Exit, RunnerError
from .venv import clean_environment, python_of

OLDEST = (0, 3, 75)
HOST_VARIABLE = "COMFYUI_PATH"
NO_START = "does not run"
# A host does not start without these.
NEEDS = (
    "torch", "torchvision", "aiohttp", "av", "einops", "numpy", "PIL", "psutil", "requests", "safetensors", "scipy",
    "sentencepiece", "torchsde", "tqdm", "transformers", "yaml",
)  # fmt: skip

# Run by the candidate interpreter, which may be any version: asks for torch, the rest of NEEDS, and a usable GPU.
_PROBE = """
import importlib, importlib.util, json, sys
names = sys.argv[1:]
found = {"missing": [n for n in names if importlib.util.find_spec(n) is None], "gpu": None, "torch": None}
found["frontend"] = importlib.util.find_spec("comfyui_frontend_package") is not None
found["python"] = sys.version.split()[0]
for name in ("torch", "torchvision"):
    try:
        importlib.import_module(name)
    except Exception as reason:
        if name not in found["missing"]:
            found["missing"].append(name + " (" + str(reason).splitlines()[0][:200] + ")")
torch = sys.modules.get("torch")
if torch is not None:
    found["torch"] = torch.__version__
    for kind in ("cuda", "xpu", "mps"):
        try:
            module = getattr(torch, kind, None) if kind != "mps" else torch.backends.mps
            if module is not None and module.is_available():
                torch.ones(1, device=kind).add(1).sum().item()
                found["gpu"] = kind
                break
        except Exception:
            pass
print("fastar-probe " + json.dumps(found))
"""


@dataclass(frozen=True)
class Python:
    """An interpreter that was asked: `missing` is empty when it can run a host; `gpu` is cuda, xpu, mps or None."""

    path: Path
    missing: tuple[str, ...]
    gpu: str | None = None
    torch: str | None = None
    version: str | None = None
    frontend: bool = False

    @property
    def fault(self) -> str:
        """What keeps it from running a host, in words: 'does not run: ...' or 'lacks torch, av'."""
        if self.missing and self.missing[0].startswith(NO_START):
            return self.missing[0]
        return f"lacks {', '.join(self.missing)}"


@dataclass(frozen=True)
class Installation:
    """A ComfyUI on this disk. `why` says how it was found; `holds_pack` = our pack lies in its custom_nodes."""

    path: Path
    version: str
    why: str
    holds_pack: bool


def is_comfyui(folder: Path) -> bool:
    """True for the root folder of a ComfyUI checkout."""
    return all((folder / name).is_file() for name in ("main.py", "nodes.py", "execution.py", "comfy/sd.py"))


def version_of(folder: Path) -> str:
    """The version a checkout gives itself, '0.0.0' when it gives none."""
    for name, pattern in (
        ("comfyui_version.py", r"__version__\s*=\s*[\"']([^\"']+)"),
        ("pyproject.toml", r"(?m)^version\s*=\s*[\"']([^\"']+)"),
    ):
        try:
            found = re.search(pattern, (folder / name).read_text(encoding="utf-8"))
        except OSError:
            continue
        if found:
            return found.group(1)
    return "0.0.0"


def version_numbers(version: str) -> tuple[int, ...]:
    """(0, 3, 75) for '0.3.75'."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _installation(folder: Path, why: str, pack: Path) -> Installation:
    version = version_of(folder)
    if version_numbers(version) < OLDEST:
        raise RunnerError(
            Exit.SETUP,
            f"{folder} ({why}) is ComfyUI {version}, expected {'.'.join(map(str, OLDEST))} or newer. Update it, or set "
            f"{HOST_VARIABLE} to a newer one.",
        )
    nodes = folder / "custom_nodes"
    entries = list(nodes.iterdir()) if nodes.is_dir() else []
    holds = any(entry.is_dir() and entry.resolve() == pack.resolve() for entry in entries)
    return Installation(folder, version, why, holds)


def find_installation(pack: Path, environ: Mapping[str, str] | None = None) -> Installation | None:
    """COMFYUI_PATH, else the ComfyUI whose custom_nodes holds the pack, else None (our own is to be used)."""
    environ = os.environ if environ is None else environ
    if named := environ.get(HOST_VARIABLE):
        folder = Path(named).expanduser().absolute()
        if not is_comfyui(folder):
            raise RunnerError(
                Exit.SETUP,
                f"{HOST_VARIABLE}={named} is no ComfyUI folder: expected main.py, nodes.py and comfy/sd.py in it. "
                "Correct it, or unset it to use the ComfyUI that this pack prepares.",
            )
        return _installation(folder, HOST_VARIABLE, pack)
    if pack.parent.name == "custom_nodes" and is_comfyui(pack.parent.parent):
        return _installation(pack.parent.parent, "the pack lies in its custom_nodes", pack)
    return None


@functools.lru_cache(maxsize=16)
def ask(python: Path, own: bool = False) -> Python:
    """Start `python`; ask what it can import and which GPU it can use (2-5 s). `own`: without the user's PYTHONPATH."""
    environ = clean_environment() if own else None
    command = [str(python), "-c", _PROBE, *NEEDS]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=180, env=environ, stdin=subprocess.DEVNULL,
            encoding="utf-8", errors="replace", check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as reason:
        return Python(python, (f"{NO_START}: {reason}",))
    for line in done.stdout.splitlines():
        if line.startswith("fastar-probe "):
            found = json.loads(line.removeprefix("fastar-probe "))
            return Python(
                python, tuple(found["missing"]), found["gpu"], found["torch"], found["python"], found["frontend"]
            )
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Python(python, (f"{NO_START}: {last[:200]}",))


def candidates(host: Path, system: str = sys.platform) -> list[Path]:
    """Interpreters that may belong to a ComfyUI, best first."""
    embedded = [folder / "python_embeded" / "python.exe" for folder in (host, host.parent)]
    own = [python_of(host / name, system) for name in ("venv", ".venv")]
    return [Path(sys.executable), *own, *embedded]


def find_python(host: Path, chosen: Path | None = None) -> Python:
    """The interpreter for a found ComfyUI; raises RunnerError(SETUP) naming what was tried and what each lacks."""
    if chosen is not None:
        return chosen_python(chosen)
    tried = []
    for path in candidates(host):
        if not path.exists():
            tried.append(f"  {path}: not there")
            continue
        found = ask(path)
        if not found.missing:
            return found
        tried.append(f"  {path}: {found.fault}")
    raise RunnerError(
        Exit.SETUP,
        f"no Python that can run the ComfyUI in {host} was found. Tried:\n" + "\n".join(tried) + "\nStart run.py with "
        "the Python you start this ComfyUI with, or name it with --python PATH.",
    )


def chosen_python(path: Path) -> Python:
    """The interpreter of --python; raises RunnerError(SETUP) when it cannot run a host."""
    found = ask(path)
    if found.missing:
        raise RunnerError(
            Exit.SETUP,
            f"--python {path} cannot run ComfyUI: it {found.fault}. Name another interpreter, or install there what is "
            "missing.",
        )
    return found
