"""Files that cannot be opened: one clear message each, nothing in them is ever run, and a way out that works."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from fastar_pack.fastar_core.checkpoint import load_checkpoint
from fastar_pack.fastar_core.checkpoint_files import conversion, read_metadata, read_weight_file
from fastar_pack.fastar_core.errors import CheckpointError
from loader.layouts import native, prefixed, write

pytestmark = pytest.mark.cpu
WEIGHTS = native(1)


class Trap:
    """Pickles into a call that makes a folder when the file is opened carelessly."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("zipped", [True, False])
def test_old_and_new_torch_files_read_alike(zipped: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "m.pt", {"generator_ema": OrderedDict(prefixed(WEIGHTS, "model."))}, zipped=zipped)
    state = load_checkpoint(path, True).state_dict
    assert all(torch.equal(state[key], value) for key, value in WEIGHTS.items())


def test_the_kind_of_file_is_told_by_content(tmp_path: Path) -> None:
    for written, renamed in (("a.safetensors", "a.pt"), ("b.pt", "b.safetensors")):
        path = write(tmp_path / written, WEIGHTS).rename(tmp_path / renamed)
        assert torch.equal(load_checkpoint(path, True).state_dict["head.modulation"], WEIGHTS["head.modulation"])


@pytest.mark.parametrize("low", [0x80, 0x3C, 0x50])
def test_a_header_length_that_looks_like_another_kind(low: int, tmp_path: Path) -> None:
    """The first byte of a safetensors file is the low byte of a length: also the mark of pickles and web pages."""
    path = write(tmp_path / "m.safetensors", {"a": torch.ones(3)}, {"causal_ar": True})
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    padded = length + (low - length) % 256
    path.write_bytes(padded.to_bytes(8, "little") + content[8 : 8 + length].ljust(padded) + content[8 + length :])
    assert path.read_bytes()[0] == low
    tensors, metadata = read_weight_file(path)
    assert torch.equal(tensors["a"], torch.ones(3))
    assert "causal_ar" in metadata["config"]


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_with_code_is_refused_and_not_run(zipped: bool, tmp_path: Path) -> None:
    folder = tmp_path / "made_by_the_file"
    path = write(tmp_path / "trap.pt", {"generator": WEIGHTS, "config": Trap(str(folder))}, zipped=zipped)
    with pytest.raises(CheckpointError, match=r"trap\.pt holds more than tensors, .* is refused \(.*mkdir"):
        read_weight_file(path)
    assert not folder.exists()
    careless = torch.load
    careless(path, weights_only=False)
    assert folder.exists(), "the trap does not work, so the test above proved nothing"


@pytest.mark.parametrize("zipped", [True, False])
def test_the_conversion_line_of_the_message_works(zipped: bool, tmp_path: Path) -> None:
    content = {"generator_ema": prefixed(WEIGHTS, "model."), "args": argparse.Namespace(lr=1), "list": [1, 2]}
    path = write(tmp_path / "with settings.pt", content, zipped=zipped)
    with pytest.raises(CheckpointError, match="one line") as caught:
        load_checkpoint(path, True)
    line = str(caught.value).splitlines()[-1]
    assert line == conversion("with settings.pt")
    program, *arguments = shlex.split(line)
    assert program == "python"
    subprocess.run([sys.executable, *arguments], cwd=tmp_path, check=True, timeout=120)
    state = load_checkpoint(tmp_path / "with settings_plain.pt", True).state_dict
    assert all(torch.equal(state[key], value) for key, value in WEIGHTS.items())


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "legacy.pt"])
@pytest.mark.parametrize("kept", [0.0, 20, 0.02, 0.5, 0.9, 0.9999])
def test_files_cut_short_say_so(name: str, kept: float, tmp_path: Path) -> None:
    path = write(tmp_path / name, {"a": torch.zeros(64, 64), "b": torch.ones(64, 64)}, zipped=name != "legacy.pt")
    content = path.read_bytes()
    path.write_bytes(content[: int(kept if kept > 1 else kept * len(content))])
    with pytest.raises(CheckpointError, match=f"{name} .*download it again") as caught:
        read_weight_file(path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("start", "words"), [
    (b"<!DOCTYPE html><html>", "a web page"),
    (b"version https://git-lfs\n", "a Git LFS pointer"),
    (b"GGUF\x03\x00\x00\x00", "a GGUF file"),
    (b"\x89PNG\r\n", "a picture"),
])  # fmt: skip
def test_other_kinds_of_files_are_named(start: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(start + bytes(300))
    with pytest.raises(CheckpointError, match=f"model.safetensors is {words}"):
        read_weight_file(path)


def test_absent_files_folders_and_odd_content(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.pt cannot be read .*choose a file that exists"):
        read_weight_file(tmp_path / "gone.pt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(CheckpointError, match="holds a list, expected weights by name"):
        read_weight_file(tmp_path / "list.pt")
    torch.save({"epoch": 3}, tmp_path / "none.pt")
    with pytest.raises(CheckpointError, match="no video model of the Wan layout"):
        load_checkpoint(tmp_path / "none.pt", True)
    torch.save({}, tmp_path / "empty.pt")
    with pytest.raises(CheckpointError, match="holds no weights at all"):
        load_checkpoint(tmp_path / "empty.pt", True)


def test_metadata_without_tensors(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"a": torch.ones(1)}, {"causal_ar": True})
    assert "causal_ar" in read_metadata(path)["config"]
    assert read_metadata(write(tmp_path / "m.pt", {"a": torch.ones(1)})) == {}
    assert read_metadata(tmp_path / "absent.safetensors") == {}
