"""ruff and the type checker on the whole pack, and each of them on a wrong sample."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests_support import PACK_ROOT

CONFIG = PACK_ROOT / "pyproject.toml"


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed in this Python")


pytestmark = pytest.mark.cpu


def run(*command: str, cwd: Path = PACK_ROOT, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, input=text, capture_output=True, text=True, check=False
    )


@needs("ruff")
def test_ruff_has_nothing_to_say() -> None:
    result = run("ruff", "check", "--output-format=concise", "--config", str(CONFIG), ".")
    assert result.returncode == 0, result.stdout + result.stderr


@needs("ruff")
@pytest.mark.parametrize(
    ("sample", "code"),
    [
        ("ex" + "ec('1')\n", "S102"),
        ("ev" + "al('1')\n", "S307"),
        ("a = 1; b = 2\n", "E702"),
        ("import os\n", "F401"),
        ("a = '" + "x" * 140 + "'\n", "E501"),
        ('def f(a=[]):\n    """Doc."""\n    return a\n', "B006"),
        ("def f():\n    return 1\n", "D103"),
        ('def f(a):\n    """Doc."""\n    return 1\n', "ARG001"),
    ],
)
def test_ruff_sees_wrong_samples(sample: str, code: str) -> None:
    stdin_name = str(PACK_ROOT / "fastar_core" / "sample.py")
    result = run("ruff", "check", "--config", str(CONFIG), "--stdin-filename", stdin_name, "-", text=sample)
    assert result.returncode == 1
    assert code in result.stdout


@pytest.fixture(scope="module")
def typed_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack under a name that is an identifier, which the repository folder need not have."""
    folder = tmp_path_factory.mktemp("types")
    for part in ("nodes", "fastar_core", "kernels"):
        shutil.copytree(PACK_ROOT / part, folder / "fastar_pack" / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACK_ROOT / "__init__.py", folder / "fastar_pack")
    return folder


def check_types(folder: Path) -> subprocess.CompletedProcess[str]:
    cache = PACK_ROOT / ".mypy_cache"
    return run("mypy", "--config-file", str(CONFIG), "--cache-dir", str(cache), "-p", "fastar_pack", cwd=folder)


@needs("mypy")
def test_types(typed_copy: Path) -> None:
    result = check_types(typed_copy)
    assert result.returncode == 0, result.stdout + result.stderr


@needs("mypy")
@pytest.mark.parametrize(
    ("sample", "code"),
    [
        ("def f(a: int) -> str:\n    return a\n", "return-value"),
        ("def f(a):\n    return a\n", "no-untyped-def"),
        ("from .errors import Nothing\n", "attr-defined"),
        ("import torch\ntorch.zeros(3).nothing()\n", "attr-defined"),
    ],
)
def test_the_type_checker_sees_wrong_samples(typed_copy: Path, sample: str, code: str) -> None:
    wrong = typed_copy / "fastar_pack" / "fastar_core" / "wrong_sample.py"
    wrong.write_text(sample, encoding="utf-8")
    try:
        result = check_types(typed_copy)
    finally:
        wrong.unlink()
    assert result.returncode == 1
    assert any("wrong_sample.py" in line and f"[{code}]" in line for line in result.stdout.splitlines()), result.stdout
