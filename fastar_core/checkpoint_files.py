"""Reads weight files without ever running code from them.

The kind of a file is told by its first bytes, not by its name. Tensors stay memory-mapped where the format allows it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .errors import CheckpointError

_DAMAGED = "compare its size with the one at the download page and download it again"
_FOREIGN_STARTS = (
    (b"GGUF", "a GGUF file; load it with a GGUF loader node and choose the preset in the FAST-AR sampler"),
    (b"version https://git-lfs", "a Git LFS pointer, not the weights themselves; download the real file"),
    (b"<", "a web page, not weights; the download went wrong, download it again"),
    (b"\x89PNG", "a picture, not weights; choose another file"),
)


def read_weight_file(path: str | Path) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Content (tensors by name, perhaps nested) and metadata of a .safetensors or .pt file; .pt files have no metadata.

    Raises CheckpointError for files that are absent, empty, cut short, no weight file, or refused as unsafe.
    """
    path = Path(path)
    start, size = _first_bytes(path)
    if start[6:9] == b"\0\0{":  # a length in 8 bytes, then JSON; its low bytes can look like any other kind
        return _read_safetensors(path, size)
    for magic, what in _FOREIGN_STARTS:
        if start.startswith(magic):
            raise CheckpointError(f"{path.name} is {what}")
    if start.startswith((b"PK\x03\x04", b"\x80")):
        return _read_pickled(path, zipped=start.startswith(b"PK")), {}
    return _read_safetensors(path, size)


def read_metadata(path: str | Path) -> dict[str, str]:
    """Header metadata of a .safetensors file, without its tensors; {} for other or damaged files."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return file.metadata() or {}
    except (SafetensorError, OSError):
        return {}


def _first_bytes(path: Path) -> tuple[bytes, int]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as reason:
        raise CheckpointError(f"{path.name} cannot be read ({reason.strerror}); choose a file that exists") from reason
    if size == 0:
        raise CheckpointError(f"{path.name} is empty (0 bytes); download it again")
    return start, size


def _read_safetensors(path: Path, size: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as reason:
        raise CheckpointError(
            f"{path.name} ({size:,} bytes) is no complete safetensors or torch file: {reason}. If it should be one, "
            f"{_DAMAGED}"
        ) from reason


def _read_pickled(path: Path, zipped: bool) -> Mapping[str, Any]:
    mapped = zipped and path.suffix != ".safetensors"  # newer torch goes by that ending, whatever is inside
    try:
        with path.open("rb") as file:
            content = torch.load(path if mapped else file, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as reason:
        if "pickle data was truncated" in str(reason):
            raise CheckpointError(f"{path.name} is cut short; {_DAMAGED}") from reason
        raise CheckpointError(refusal(path.name, str(reason))) from reason
    except MemoryError:
        raise
    except Exception as reason:  # a damaged file can make the unpickler raise nearly anything
        raise CheckpointError(
            f"{path.name} ({path.stat().st_size:,} bytes) is damaged or cut short ({type(reason).__name__}: "
            f"{first_line(reason)}); {_DAMAGED}"
        ) from reason
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{path.name} holds a {type(content).__name__}, expected weights by name; choose a model's state-dict file"
        )
    return content


def first_line(reason: BaseException) -> str:
    """First line of an exception's text, 200 characters at most."""
    lines = str(reason).strip().splitlines()
    return lines[0][:200] if lines else "no details"


def refusal(name: str, reason: str) -> str:
    """Why a pickled file is not opened here, with the line that turns it into one that is."""
    named = [line.strip() for line in reason.splitlines() if "GLOBAL" in line or "Unsupported" in line]
    detail = named[0][:200] if named else "it is not plain tensors"
    return (
        f"{name} holds more than tensors, and opening it could run code hidden in it, so it is refused ({detail}). "
        "If you trust where it comes from, turn it into a plain file elsewhere (a machine or container without "
        "anything of value) with this one line, in the folder of the file, then choose the new "
        f"file:\n{conversion(name)}"
    )


def conversion(name: str) -> str:
    """A shell line that rewrites the pickled file `name` with nothing but its (nested) tensors."""
    tensors = "{k: f(v) for k, v in o.items() if isinstance(v, (dict, torch.Tensor))}"
    source = f"torch.{'load'}('{name}', map_location='cpu', weights_only=False)"
    steps = (
        "import torch",
        f"f = lambda o: {tensors} if isinstance(o, dict) else o.detach()",
        f"torch.save(f({source}), '{Path(name).stem}_plain.pt')",
    )
    return f'python -c "{"; ".join(steps)}"'
