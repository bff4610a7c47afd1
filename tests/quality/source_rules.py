"""Rules about one source file at a time. Each takes (path, text) and returns the faults as lines of text.

The patterns are written so that this file does not break its own rules.
"""

from __future__ import annotations

import ast
import re

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 40
MAX_KERNEL_LINES = 120

ALLOWED_HOSTS = {
    "127.0.0.1",
    "localhost",
    "arxiv.org",
    "docs.comfy.org",
    "download.pytorch.org",
    "files.pythonhosted.org",
    "git-lfs",  # the beginning of a pointer file
    "github.com",
    "huggingface.co",
    "json-schema.org",
    "pypi.org",
    "www.apache.org",
}

# What the registry's checks fail on in any .py file, and the remedy.
FORBIDDEN = (
    (r"\.cuda\(", "move tensors with .to(device), the device comes from the host"),
    (r"\.to\(\s*f?[\"']cuda", "the device comes from the host"),
    (r"\bautocast\(", "choose dtypes explicitly"),
    (
        r"nn\.(Linear|Conv[123]d|ConvTranspose[123]d|LayerNorm|GroupNorm|Embedding)\(",
        "use functional forms and own parameters",
    ),
    (r"torch\.load\((?![^\n]*weights_only=True)", "pass weights_only=True in the same line"),
    (r"torch\.cuda\.empty_cache\(", "the host manages its memory"),
)
PACK_FORBIDDEN = (
    (r"\bsys\.path\b", "use relative imports"),
    (r"\bos\.system\(", "nothing is started at run time"),
    (r"\bfrom\s+unittest\b|\bimport\s+unittest\b", "no process-wide patches"),
)
MACHINE_PATHS = (
    r"(?<![\w.~])/wor[k]/",
    r"(?<![\w.~])/roo[t]/",
    r"(?<![\w.~])/hom[e]/\w",
    r"(?<![\w.~])/User[s]/\w",
    r"\b[A-Z]:\\+User[s]\\",
)


def limit_faults(path: str, text: str) -> list[str]:
    """Files and functions (a function counts from `def` to its last line, docstring included)."""
    lines = len(text.splitlines())
    faults = [f"{path}: {lines} lines, the limit is {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []
    limit = MAX_KERNEL_LINES if path.startswith("kernels/") else MAX_FUNCTION_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > limit:
                faults.append(f"{path}:{node.lineno}: {node.name} has {length} lines, the limit is {limit}")
    return faults


def character_faults(path: str, text: str) -> list[str]:
    """Characters outside cp1252: Windows tools that read with the default encoding die on them."""
    return [
        f"{path}:{number}: {character!r} is not in cp1252"
        for number, line in enumerate(text.splitlines(), start=1)
        for character in sorted(set(line))
        if not _in_cp1252(character)
    ]


def _in_cp1252(character: str) -> bool:
    try:
        character.encode("cp1252")
    except UnicodeEncodeError:
        return False
    return True


def forbidden_faults(path: str, text: str) -> list[str]:
    """Texts the registry's checks refuse, and calls of eval and exec."""
    in_pack = path.startswith(("nodes/", "fastar_core/", "kernels/", "example_workflows/")) or "/" not in path
    faults = []
    for pattern, remedy in FORBIDDEN + (PACK_FORBIDDEN if in_pack else ()):
        for match in re.finditer(pattern, text):
            line = text.count("\n", 0, match.start()) + 1
            faults.append(f"{path}:{line}: '{match.group()}': {remedy}")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
            faults.append(f"{path}:{node.lineno}: {node.func.id} is refused by the registry")
    return faults


def machine_faults(path: str, text: str) -> list[str]:
    """Folders of one machine, and addresses that are not on the short list of public ones."""
    faults = []
    for pattern in MACHINE_PATHS:
        for match in re.finditer(pattern, text):
            line = text.count("\n", 0, match.start()) + 1
            faults.append(f"{path}:{line}: '{match.group()}' is a folder of one machine")
    for match in re.finditer(r"https?://([A-Za-z0-9.-]*[A-Za-z0-9])", text):
        if match.group(1) not in ALLOWED_HOSTS:
            line = text.count("\n", 0, match.start()) + 1
            faults.append(
                f"{path}:{line}: the address {match.group()} is not on the list of public ones (ALLOWED_HOSTS)"
            )
    return faults


def open_text_faults(path: str, text: str) -> list[str]:
    """Text files opened without an encoding: they are read differently on Windows."""
    faults = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in {"read_text", "write_text"} and not any(keyword.arg == "encoding" for keyword in node.keywords):
            faults.append(f"{path}:{node.lineno}: {name} without encoding=")
    return faults
