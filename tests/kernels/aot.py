"""Compiles the Triton kernels for GPUs that are not there, and reads what became of them.

Needs Triton with TRITON_INTERPRET unset; its wheel brings the assembler and the disassembler.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
MATRIX = r"\b(?:HMMA|IMMA|HGMMA|IGMMA|QGMMA|UTCHMMA|UTCIMMA|UTCQMMA)\b"
NEWEST = {"sm_90": r"\b[HIQ]GMMA\b", "sm_100": r"\bUTC[HIQ]MMA\b"}  # instructions of whole warp groups
AMD_MATRIX = "v_mfma"


@dataclass(frozen=True)
class Variant:
    """One specialisation of a kernel: types of the run-time arguments, values of the others, what divides by 16."""

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, int]
    divisible: tuple[str, ...] = ()
    matrix: bool = True  # its main work belongs on the matrix units


@dataclass
class Built:
    """What the compiler made of a variant for one GPU."""

    variant: str
    arch: str
    registers: int = 0
    stack: int = 0
    spills: int = 0
    shared: int = 0
    matrix: int = 0
    newest: int = 0
    async_copies: int = 0
    descriptor_loads: int = 0
    notes: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "notes"}


def target(arch: str) -> GPUTarget:
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def compiled(variant: Variant, arch: str) -> Any:
    """Triton's compiled object; raises what the compiler raises."""
    names = variant.kernel.arg_names
    unknown = set(variant.types) | set(variant.constants)
    if unknown != set(names):
        raise ValueError(f"{variant.name}: arguments {sorted(unknown ^ set(names))} are not those of the kernel")
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    places = {(names.index(name),): value for name, value in variant.constants.items()}
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.divisible if name in variant.types}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=places, attrs=hints)
    return triton.compile(source, target=target(arch), options=dict(variant.options))


def build(variant: Variant, arch: str) -> Built:
    """Compile and measure."""
    kernel = compiled(variant, arch)
    built = Built(variant.name, arch, shared=kernel.metadata.shared)
    if arch.startswith("gfx"):
        _read_amd(built, kernel.asm["amdgcn"])
    else:
        _read_nvidia(built, kernel.asm["cubin"])
    return built


def _read_nvidia(built: Built, cubin: bytes) -> None:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run(
                [str(BINARIES / "cuobjdump"), option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for option in ("--dump-resource-usage", "--dump-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise ValueError(f"{built.variant} on {built.arch}: no resource usage in {usage!r}")
    built.registers, built.stack = int(found.group(1)), int(found.group(2))
    built.spills = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    built.matrix = len(re.findall(MATRIX, sass))
    built.newest = len(re.findall(NEWEST[built.arch], sass)) if built.arch in NEWEST else 0
    built.async_copies = len(re.findall(r"\bLDGSTS\b", sass))
    built.descriptor_loads = len(re.findall(r"\bUTMALDG\b", sass))


def _read_amd(built: Built, text: str) -> None:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        return int(found.group(1)) if found else 0

    built.registers = number("vgpr_count")
    built.spills = number("vgpr_spill_count")
    built.stack = number("private_segment_fixed_size")
    built.matrix = len(re.findall(AMD_MATRIX, text))
