"""Which packages our own ComfyUI gets, by operating system and Python version."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from .errors import Exit, RunnerError

PYTHONS = ((3, 10), (3, 11), (3, 12), (3, 13), (3, 14))
SYSTEMS = ("Linux", "Darwin", "Windows")
FRONTEND = "comfyui-frontend-package==1.32.9"

# The set the tests run on. torch comes first: it decides which builds of the others fit.
EXACT = (
    "torch==2.13.0",
    "aiohttp==3.14.5",
    "av==18.1.0",
    "einops==0.8.2",
    "filelock==4.3.1",
    "numpy==2.4.6",
    "pillow==13.0.0",
    "psutil==7.2.2",
    "pydantic==2.14.4",
    "PyYAML==6.0.4",
    "requests==2.34.2",
    "safetensors==0.8.0",
    "scipy==1.17.1",
    "sentencepiece==0.2.3",
    "tokenizers==0.23.3",
    "torchsde==0.2.6",
    "tqdm==4.70.1",
    "transformers==5.24.0",
    "yarl==1.25.1",
)
# torchvision 0.16.2 is the newest that imports beside every build of torch 2.13 (its metadata asks for another torch).
EXACT_BARE = ("torchvision==0.16.2", "kornia==0.8.2", "kornia_rs==0.2.0", "spandrel==0.4.2", FRONTEND)

# Elsewhere torchvision's own metadata names the torch it was built for, so pip can only pick a matching pair.
RANGES = (
    "torch>=2.9,<2.15",
    "torchvision>=0.24,<0.30",
    "aiohttp>=3.11.8,<4",
    "av>=14.2,<19",
    "einops>=0.8,<1",
    "filelock>=3.13,<5",
    "kornia>=0.8,<0.9",
    "kornia_rs>=0.1.9,<0.3",
    "numpy>=1.26,<3",
    "pillow>=10.3,<14",
    "psutil>=5.9.8,<8",
    "pydantic>=2.7,<3",
    "PyYAML>=6.0.2,<7",
    "requests>=2.32,<3",
    "safetensors>=0.4.5,<1",
    "scipy>=1.13,<2",
    "sentencepiece>=0.2.1,<0.3",
    "spandrel>=0.4.1,<0.5",
    "tokenizers>=0.21,<0.24",
    "torchsde==0.2.6",
    "tqdm>=4.66,<5",
    "transformers>=4.56,<6",
    "yarl>=1.18,<2",
)

TESTS = ("pytest==9.2.0", "ruff==0.17.6", "mypy==2.4.1")
# What ComfyUI 0.27 cannot start without, beyond the set above.
NEWER_HOST = (
    "alembic==1.20.1",
    "blake3==1.0.11",
    "comfy-aimdo==0.4.10",
    "comfy-kitchen==0.2.16",
    "pydantic-settings==2.16.3",
    "simpleeval==1.0.8",
    "SQLAlchemy==2.1.9",
)


@dataclass(frozen=True)
class Layer:
    """One installation step: `plain` with dependencies, then `bare` without."""

    name: str
    plain: tuple[str, ...]
    bare: tuple[str, ...] = ()
    download_mb: int = 0  # at most
    licences: str = ""

    @property
    def digest(self) -> str:
        """Changes when anything that is installed changes."""
        text = json.dumps([asdict(self)[key] for key in ("plain", "bare")])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_LINUX_MB = 3100  # the CPU build of PyTorch takes 450, the usual Linux build brings the CUDA libraries
_LICENCES = "PyTorch and torchvision BSD-3-Clause, transformers Apache-2.0, frontend GPL-3.0, the rest permissive"


def host_layer(system: str, machine: str, python: tuple[int, int]) -> Layer:
    """The packages of our own ComfyUI for platform.system(), platform.machine() and (major, minor) of Python.

    Raises RunnerError(SETUP) where no set exists.
    """
    if python not in PYTHONS:
        versions = f"{PYTHONS[0][0]}.{PYTHONS[0][1]} to {PYTHONS[-1][0]}.{PYTHONS[-1][1]}"
        raise RunnerError(
            Exit.SETUP,
            f"Python {python[0]}.{python[1]} has no tested package set: expected {versions}. Start run.py with one of "
            "those, or set COMFYUI_PATH to a ComfyUI of your own.",
        )
    if system not in SYSTEMS:
        raise RunnerError(
            Exit.SETUP,
            f"no package set for the system '{system}': expected {', '.join(SYSTEMS)}. Set COMFYUI_PATH to a ComfyUI "
            "of your own.",
        )
    if system == "Darwin" and machine.lower() in {"x86_64", "amd64", "i386"}:
        raise RunnerError(
            Exit.SETUP,
            "PyTorch no longer comes for Macs with an Intel processor. Set COMFYUI_PATH to a ComfyUI that works there, "
            "or use --host with a server on another machine.",
        )
    if system == "Linux" and python == (3, 11):
        return Layer("host", EXACT, EXACT_BARE, _LINUX_MB, _LICENCES)
    return Layer("host", RANGES, (FRONTEND,), _LINUX_MB if system == "Linux" else 450, _LICENCES)


def layer_for_tests() -> Layer:
    """What the tests need beside the host's packages."""
    return Layer("tests", TESTS, (), 30, "MIT")


def layer_for_newer_host() -> Layer:
    """What lets a ComfyUI 0.27 start in the same environment."""
    return Layer("newer-host", NEWER_HOST, (), 15, "MIT, Apache-2.0; comfy packages GPL-3.0 and Apache-2.0")
