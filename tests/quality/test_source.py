"""Every source file keeps the house rules, and every rule catches a deliberately wrong sample."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quality.import_rules import import_faults
from quality.source_files import PACK_FOLDERS, python_files, text_files
from quality.source_rules import character_faults, forbidden_faults, limit_faults, machine_faults, open_text_faults

pytestmark = pytest.mark.cpu

Rule = Callable[[str, str], list[str]]

# path -> why the file may break the limits of length
LIMIT_EXCEPTIONS: dict[str, str] = {}

LONG_FUNCTION = "def f():\n" + "    x = 1\n" * 40
# A tilde stands where the sample would otherwise trip the checks that read this file.
WRONG: list[tuple[Rule, str, str]] = [
    (limit_faults, "nodes/a.py", "x = 1\n" * 301),
    (limit_faults, "nodes/a.py", LONG_FUNCTION),
    (limit_faults, "kernels/a.py", "def f():\n" + "    x = 1\n" * 120),
    (limit_faults, "nodes/a.py", "class A:\n    async " + LONG_FUNCTION.replace("\n", "\n    ")),
    (character_faults, "nodes/a.py", "# a " + chr(0x2192) + " b"),
    (forbidden_faults, "tests/a.py", "x.cu~da()"),
    (forbidden_faults, "tests/a.py", "x.to(~'cuda:0')"),
    (forbidden_faults, "tests/a.py", "with torch.auto~cast(): pass"),
    (forbidden_faults, "tests/a.py", "a = nn.Lin~ear(3, 4)"),
    (forbidden_faults, "tests/a.py", "a = torch.nn.Conv2~d(3, 4)"),
    (forbidden_faults, "tests/a.py", "torch.lo~ad(p)"),
    (forbidden_faults, "tests/a.py", "torch.lo~ad(p, weights_only=False)"),
    (forbidden_faults, "tests/a.py", "torch.cuda.empty_ca~che()"),
    (forbidden_faults, "tests/a.py", "ev~al('1')"),
    (forbidden_faults, "fastar_core/a.py", "sys.pa~th.append('x')"),
    (machine_faults, "README.md", "see /wo~rk/shared"),
    (machine_faults, "nodes/a.py", "P = '/ro~ot/x'"),
    (machine_faults, "README.md", "C:\\Us~ers\\me"),
    (machine_faults, "README.md", "https:~//mirror.example/simple"),
    (open_text_faults, "nodes/a.py", "p.read_text()"),
    (import_faults, "fastar_core/a.py", "from ..nodes import sampler"),
    (import_faults, "fastar_core/policies/a.py", "from ...nodes.host import hook"),
    (import_faults, "kernels/triton/a.py", "from ...fastar_core import context"),
    (import_faults, "kernels/a.py", "from .. import fastar_core"),
    (import_faults, "nodes/a.py", "from ..kernels import registry"),
    (import_faults, "nodes/a.py", "def f():\n    import comfy.sd"),
    (import_faults, "nodes/a.py", "import folder_paths"),
    (import_faults, "nodes/host/sub/a.py", "from ......x import y"),
    (import_faults, "fastar_core/a.py", "import fastar_core.context"),
    (import_faults, "fastar_core/a.py", "from kernels import registry"),
    (import_faults, "fastar_core/a.py", "import triton"),
    (import_faults, "fastar_core/a.py", "importlib.import_module('comfy.sd')"),
    (import_faults, "kernels/flashinfer/a.py", "import triton"),
    (import_faults, "nodes/host/a.py", "import einops"),
    (import_faults, "__init__.py", "from .fastar_core import context"),
    (import_faults, "__init__.py", "import torch"),
]
RIGHT: list[tuple[Rule, str, str]] = [
    (limit_faults, "nodes/a.py", "x = 1\n" * 300),
    (limit_faults, "kernels/a.py", LONG_FUNCTION),
    (forbidden_faults, "tests/a.py", "sys.path.insert(0, 'x')\ntorch.lo~ad(p, weights_only=True)"),
    (machine_faults, "README.md", "~/comfy/ComfyUI, https://github.com/a/b, models/works/x, http://127.0.0.1:8188"),
    (
        import_faults,
        "nodes/host/a.py",
        "import comfy.sd\nfrom ...fastar_core.context import FwdCtx\nfrom . import hook",
    ),
    (
        import_faults,
        "fastar_core/policies/a.py",
        "from ...kernels import registry\nfrom ..context import FwdCtx\nimport torch",
    ),
    (import_faults, "kernels/triton/a.py", "import triton.language as tl\nfrom ..registry import op"),
    (import_faults, "__init__.py", "from .nodes.host import host_present\nimport logging"),
]


def _plain(sample: str) -> str:
    return sample if sample.startswith("~") else sample.replace("~", "")


@pytest.mark.parametrize(("rule", "path", "sample"), WRONG)
def test_a_wrong_sample_is_caught(rule: Rule, path: str, sample: str) -> None:
    assert rule(path, _plain(sample))


@pytest.mark.parametrize(("rule", "path", "sample"), RIGHT)
def test_a_right_sample_passes(rule: Rule, path: str, sample: str) -> None:
    assert rule(path, _plain(sample)) == []


@pytest.mark.parametrize("rule", [character_faults, forbidden_faults, open_text_faults])
def test_python_files(rule: Rule) -> None:
    assert [fault for path, text in python_files() for fault in rule(path, text)] == []


def test_limits() -> None:
    faults = {path: limit_faults(path, text) for path, text in python_files()}
    assert [fault for path, found in faults.items() if path not in LIMIT_EXCEPTIONS for fault in found] == []
    assert [path for path in LIMIT_EXCEPTIONS if not faults.get(path)] == [], "these exceptions are not needed any more"


def test_imports_go_one_way() -> None:
    files = python_files(PACK_FOLDERS)
    assert len(files) > 20
    assert [fault for path, text in files for fault in import_faults(path, text)] == []


def test_no_traces_of_one_machine() -> None:
    assert [fault for path, text in text_files() for fault in machine_faults(path, text)] == []
