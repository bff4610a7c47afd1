"""The type checker on the runner, which is no part of the pack's package and so is checked by itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from _runner.paths import PACK_ROOT, WORKFLOWS

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed in this Python")]


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    options = ["--config-file", str(PACK_ROOT / "pyproject.toml"), "--cache-dir", str(PACK_ROOT / ".mypy_cache")]
    command = [sys.executable, "-m", "mypy", *options, "-p", "_runner"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_types(tmp_path: Path) -> None:
    shutil.copytree(WORKFLOWS / "_runner", tmp_path / "_runner", ignore=shutil.ignore_patterns("__pycache__"))
    done = check(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "_runner" / "wrong.py").write_text("def f(a: int) -> str:\n    return a\n", encoding="utf-8")
    done = check(tmp_path)
    assert done.returncode == 1
    assert "wrong.py" in done.stdout
