"""pyproject.toml, the licence and the ignore lists say what the registry and its users need to know."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

from tests_support import PACK_ROOT

pytestmark = pytest.mark.cpu

TOP_LEVEL = {
    "__init__.py", "nodes", "fastar_core", "kernels", "example_workflows", "tests", "requirements.txt",
    "pyproject.toml", "README.md", "LICENSE", ".ci", ".comfyignore", ".gitignore",
}  # fmt: skip


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    return tomllib.loads((PACK_ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_nothing_is_required_beyond_the_host(project: dict[str, Any]) -> None:
    assert project["project"]["dependencies"] == []
    assert project["project"]["optional-dependencies"] == {"cuda": ["triton", "flashinfer-python"]}
    lines = (PACK_ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.strip() and not line.startswith("#")] == []


def test_registry_metadata(project: dict[str, Any]) -> None:
    assert project["project"]["name"] == "fast-ar"
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["project"]["version"])
    assert project["project"]["license"] == {"file": "LICENSE"}
    assert project["project"]["requires-python"] == ">=3.10"
    assert project["tool"]["comfy"]["requires-comfyui"] == ">=0.3.75"
    assert "web" not in project["tool"]["comfy"], "WEB_DIRECTORY declares the folder; both together register it twice"


def test_what_only_the_owner_knows_is_a_marked_placeholder(project: dict[str, Any]) -> None:
    text = (PACK_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for key, value in (
        ("PublisherId", project["tool"]["comfy"]["PublisherId"]),
        ("Repository", project["project"]["urls"]["Repository"]),
    ):
        before = text[: text.index(f"{key} =")].splitlines()
        assert value == "", f"{key} is filled in; then this test and the comment above the key can go"
        assert any("PLACEHOLDER" in line for line in before[-3:])


def test_the_licence_is_apache_2() -> None:
    text = (PACK_ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text[:120]
    assert "END OF TERMS AND CONDITIONS" in text
    assert len(text.splitlines()) > 190


def test_nothing_else_lies_at_the_top_level() -> None:
    git = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=PACK_ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if git.returncode != 0:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in git.stdout.splitlines()}
    assert top <= TOP_LEVEL


def test_the_registry_archive_holds_the_workflows_but_no_tests() -> None:
    ignored = (PACK_ROOT / ".comfyignore").read_text(encoding="utf-8").split()
    assert "tests/" in ignored
    assert not any(line.startswith(("example_workflows", "nodes", "fastar_core", "kernels")) for line in ignored)


def test_this_python_is_one_we_promise(project: dict[str, Any]) -> None:
    assert sys.version_info >= (3, 10)
    assert project["tool"]["ruff"]["target-version"] == "py310"
    assert project["tool"]["mypy"]["python_version"] == "3.10"
