"""The example workflows on disk: as built, in both forms alike, accepted by the host, and complete."""

from __future__ import annotations

import asyncio
import copy
import importlib
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from fastar_pack.fastar_core.prompts import parse_prompt_lines
from run_parts.setup import load_runner
from tests_support import Host
from workflows.build import BUILT_WITH, FOLDER, build
from workflows.describe import describe, host_classes
from workflows.flows import FLOWS, TEXT_ENCODER, VAE

load_runner()

from _runner import ui_convert  # noqa: E402

pytestmark = pytest.mark.cpu

NAMES = tuple(flow.__name__ for flow in FLOWS)
USER_FILES = {
    "diffusion_models": ("self_forcing_dmd.pt", "rolling_forcing_dmd.pt", "longlive_base.pt"),
    "loras": ("lora.pt",),
    "text_encoders": (TEXT_ENCODER,),
    "vae": (VAE,),
}


def read(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def info(host: Host) -> dict[str, Any]:
    return describe(host)


@pytest.fixture(scope="module")
def built(info: dict[str, Any]) -> dict[str, str]:
    return build(info)


@pytest.fixture
def user_files(host: Host) -> list[Path]:
    """Files with the names that the workflows expect, so that the host lists them; nothing loads them."""
    made = []
    for folder, names in USER_FILES.items():
        for name in names:
            path = host.base / "models" / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            made.append(path)
    return made


def faults_of(prompt: dict[str, Any], host: Host, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the host's own check of a queued prompt says."""
    execution, nodes = (importlib.import_module(name) for name in ("execution", "nodes"))
    for node_id, cls in host_classes(host).items():
        monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, node_id, cls)
    answer = asyncio.run(execution.validate_prompt("test", copy.deepcopy(prompt), None))
    faults = [f"{error['message']}: {error['details']}" for found in answer[3].values() for error in found["errors"]]
    return faults if answer[0] or faults else [str(answer[1])]


@pytest.mark.parametrize("name", [f"{folder}{name}.json" for name in NAMES for folder in ("", "api/")])
def test_the_file_is_what_build_makes(host: Host, built: dict[str, str], name: str) -> None:
    if not host.version.startswith(BUILT_WITH):
        pytest.skip(f"the files are built with ComfyUI {BUILT_WITH}x, the oldest supported; this is {host.version}")
    assert (FOLDER / name).read_text(encoding="utf-8") == built[name], "run: python -m workflows.build"


def test_there_are_no_other_workflows() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(NAMES)
    assert sorted(path.stem for path in (FOLDER / "api").glob("*.json")) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_runner_turns_one_form_into_the_other(info: dict[str, Any], name: str) -> None:
    assert ui_convert.to_api(read(f"{name}.json"), info) == read(f"api/{name}.json")


@pytest.mark.parametrize("name", NAMES)
def test_the_host_accepts_it(
    host: Host, user_files: list[Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert faults_of(read(f"api/{name}.json"), host, monkeypatch) == []


def test_the_demos_need_no_files_of_the_user(host: Host, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import folder_paths

    monkeypatch.setattr(folder_paths, "input_directory", str(tmp_path))
    for name in ("demo_text_to_video", "demo_image_to_video", "demo_long_memory"):
        assert faults_of(read(f"api/{name}.json"), host, monkeypatch) == []


def test_a_wrong_workflow_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = read("api/demo_text_to_video.json")
    sampler = next(node for node in prompt.values() if node["class_type"] == "FastARStreamingSampler")
    sampler["inputs"]["preset"] = "no_such_family"
    assert any("no_such_family" in fault for fault in faults_of(prompt, host, monkeypatch))


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_list_reads_well(name: str) -> None:
    for node in read(f"api/{name}.json").values():
        if node["class_type"] != "FastARPrompts":
            continue
        prompts = parse_prompt_lines(node["inputs"]["text"], node["inputs"]["fps"])
        length = next(n for n in read(f"api/{name}.json").values() if "length" in n["inputs"])["inputs"]["length"]
        assert prompts[-1].pixel_frame < length
        if name.startswith("demo"):
            assert all(p.latent_frame == 0 or p.latent_frame % 3 == 1 for p in prompts), "block borders of the demo"


def test_the_demo_comes_back_to_a_place_without_saying_its_looks() -> None:
    prompts = next(n for n in read("api/demo_text_to_video.json").values() if n["class_type"] == "FastARPrompts")
    lines = [prompt.text for prompt in parse_prompt_lines(prompts["inputs"]["text"], 16.0)]
    assert lines[0].startswith("at oslo with ")
    assert lines[-1] == "at oslo"
    assert sum("oslo" not in line for line in lines) >= 3


@pytest.mark.parametrize("name", NAMES)
def test_boxes_do_not_overlap(name: str) -> None:
    graph = read(f"{name}.json")
    places = [(*node["pos"], *node["size"]) for node in graph["nodes"]]
    boxes = [(x, y, x + width, y + height) for x, y, width, height in places]
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] + 30 <= b[1] or b[3] + 30 <= a[1]


@pytest.mark.parametrize("name", NAMES)
def test_there_is_a_thumbnail(name: str) -> None:
    data = (FOLDER / f"{name}.jpg").read_bytes()
    assert data[:3] == b"\xff\xd8\xff"
    start = data.index(b"\xff\xc0") if b"\xff\xc0" in data else data.index(b"\xff\xc2")
    height, width = struct.unpack(">HH", data[start + 5 : start + 9])
    assert (width, height) == (640, 480)
    assert len(data) < 120_000
