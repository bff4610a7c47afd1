"""Who may import whom: nodes -> fastar_core -> kernels, the host only in nodes/host, otherwise relative."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator

LAYERS = {
    "": {"nodes"},
    "nodes": {"nodes", "fastar_core"},
    "fastar_core": {"fastar_core", "kernels"},
    "kernels": {"kernels"},
}
HOST = {
    "comfy",
    "comfy_api",
    "comfy_api_nodes",
    "comfy_config",
    "comfy_execution",
    "comfy_extras",
    "comfyui_version",
    "execution",
    "folder_paths",
    "latent_preview",
    "node_helpers",
    "nodes",
    "protocol",
    "server",
}
LIBRARIES = {
    "": set(),
    "nodes": {"torch", "numpy"},
    "nodes/host": {"torch", "numpy", "av", "PIL", "safetensors", *HOST},
    "fastar_core": {"torch", "safetensors"},
    "kernels": {"torch"},
    "kernels/triton": {"torch", "triton"},
    "kernels/flashinfer": {"torch", "flashinfer"},
}


def imports_of(path: str, text: str) -> Iterator[tuple[int, int, str]]:
    """(line, level, dotted name) of each import; level > 0 means relative; importlib with a constant name counts."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, 0, alias.name
        elif isinstance(node, ast.ImportFrom):
            if node.module:
                yield node.lineno, node.level, node.module
            else:
                for alias in node.names:
                    yield node.lineno, node.level, alias.name
        elif isinstance(node, ast.Call) and _called(node.func) in {"import_module", "__import__"} and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                name = argument.value.lstrip(".")
                yield node.lineno, len(argument.value) - len(name), name


def _called(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def import_faults(path: str, text: str) -> list[str]:
    """Faults of one pack file; `path` is relative to the pack root with forward slashes."""
    folders = path.split("/")[:-1]
    faults = []
    for line, level, name in imports_of(path, text):
        fault = _relative_fault(folders, level, name) if level else _absolute_fault(folders, name.split(".")[0])
        if fault:
            faults.append(f"{path}:{line}: {fault}")
    return faults


def _relative_fault(folders: list[str], level: int, name: str) -> str | None:
    if level > len(folders) + 1:
        return f"'{'.' * level}{name}' leaves the pack"
    target = [*folders[: len(folders) + 1 - level], *name.split(".")][0]
    layer = folders[0] if folders else ""
    if target in LAYERS[layer] or target == layer:
        return None
    return f"{layer or 'the root'} imports {target}; allowed: {', '.join(sorted(LAYERS[layer]))}"


def _absolute_fault(folders: list[str], package: str) -> str | None:
    if package in sys.stdlib_module_names:
        return None
    for depth in (2, 1, 0):
        allowed = LIBRARIES.get("/".join(folders[:depth]))
        if allowed is not None and len(folders) >= depth:
            break
    else:
        allowed = set()
    if package in allowed:
        return None
    if package in HOST:
        return f"the host's '{package}' is imported outside nodes/host (inside the pack, imports are relative)"
    return f"'{package}' is not among the libraries of this folder ({', '.join(sorted(allowed)) or 'none'})"
