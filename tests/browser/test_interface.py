"""The pack in the real web interface: templates, layout, a run with preview and video, the help panel."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from browser.conftest import LENGTH, NAMES, WORKFLOWS

pytestmark = pytest.mark.cpu

Box = list[float]


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]


def inside(a: Box, b: Box) -> bool:
    return b[0] <= a[0] and b[1] <= a[1] and a[0] + a[2] <= b[0] + b[2] and a[1] + a[3] <= b[1] + b[3]


def layout_faults(layout: dict[str, Any]) -> list[str]:
    """Nodes on top of each other, half in a frame, or (but for notes) in none."""
    faults = []
    for a, b in itertools.combinations(layout["nodes"], 2):
        if overlap(a["box"], b["box"]):
            faults.append(f"{a['title']} and {b['title']} overlap")
    for node in layout["nodes"]:
        frames = [group for group in layout["groups"] if overlap(node["box"], group["box"])]
        if any(not inside(node["box"], group["box"]) for group in frames):
            faults.append(f"{node['title']} sticks out of its frame")
        if not frames and node["type"] != "MarkdownNote":
            faults.append(f"{node['title']} is in no frame")
    return faults


def test_layout_faults_are_found() -> None:
    def node(box: Box, kind: str = "A") -> dict[str, Any]:
        return {"title": "x", "type": kind, "box": box}

    frame = {"title": "g", "box": [0, 0, 100, 100]}
    good = [node([10, 10, 30, 30]), node([50, 10, 30, 30]), node([200, 0, 10, 10], "MarkdownNote")]
    assert layout_faults({"nodes": good, "groups": [frame]}) == []
    for wrong in (node([20, 20, 30, 30]), node([85, 50, 30, 30]), node([200, 50, 30, 30])):
        assert len(layout_faults({"nodes": [*good, wrong], "groups": [frame]})) == 1


def test_the_template_page_offers_and_loads_the_demo(seen: dict[str, Any]) -> None:
    flow = json.loads((WORKFLOWS / "demo_text_to_video.json").read_text(encoding="utf-8"))
    assert sorted(node["type"] for node in seen["template"]["nodes"]) == sorted(node["type"] for node in flow["nodes"])
    assert len(seen["template"]["groups"]) == len(flow["groups"])


@pytest.mark.parametrize("name", NAMES)
def test_no_node_hides_another(seen: dict[str, Any], name: str) -> None:
    assert layout_faults(seen["workflows"][name]) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_interface_makes_our_api_form(seen: dict[str, Any], name: str) -> None:
    committed = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
    made = seen["workflows"][name]["prompt"]
    assert made.keys() == committed.keys()
    for number, node in committed.items():
        inputs = made[number]["inputs"]
        if node["class_type"] == "PreviewAny":
            inputs.pop("preview", None)  # the text box that the interface itself adds
        assert (made[number]["class_type"], inputs) == (node["class_type"], node["inputs"])


def test_a_run_shows_previews_progress_and_the_video(seen: dict[str, Any]) -> None:
    run = seen["run"]
    assert run["end"] == "success"
    assert run["previews"] >= 4, "one for each denoise step of the block"
    loaded, first, *_ = run["texts"]
    assert loaded.startswith("file: fastar_demo_dit.safetensors\n")
    assert first.startswith(f"block 1 of 1, frame {LENGTH} of {LENGTH}")
    assert run["texts"][-1].startswith(f"{LENGTH} frames (0.8 s), seed 1\n")
    assert (seen["video"]["width"], seen["video"]["height"]) == (128, 128)
    assert seen["video"]["seconds"] == pytest.approx(LENGTH / 16, abs=0.1)
    assert "demo_00001_.mp4" in seen["video"]["source"]
    assert seen["leftover"] is False, "the last preview picture still stands beside the video"
    assert json.loads(seen["report"])["frames"]["delivered"] == LENGTH


def test_the_help_panel_shows_our_page(seen: dict[str, Any]) -> None:
    assert seen["help"] is True


def test_no_script_errors(seen: dict[str, Any]) -> None:
    ours = [line for line in seen["console"] if f"/extensions/{seen['pack']}" in line]
    ours = [line for line in ours if not line.endswith("/en.md")]  # asked for before the page in all languages
    assert seen["errors"] == []
    assert ours == []
