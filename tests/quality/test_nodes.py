"""The node classes as users meet them, inside a real host."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from quality.node_rules import node_faults
from tests_support import PACK_ROOT, Host

pytestmark = pytest.mark.cpu

DOCS = PACK_ROOT / "nodes" / "web" / "docs"
# Ids in saved workflows: they are never renamed or removed.
PUBLISHED = {
    "FastARLoadModel",
    "FastARStreamingSampler",
    "FastARSampler",
    "FastARPrompts",
    "FastARDemoVAE",
    "FastARDemoText",
    "FastARDemoSlate",
    "FastARDemoPicture",
}


class GoodNode:
    CATEGORY = "FAST-AR/sub"
    DESCRIPTION = "A node that does everything right."
    FUNCTION = "run"
    RETURN_TYPES = ("LATENT",)
    RETURN_NAMES = ("latent",)
    OUTPUT_TOOLTIPS = ("What comes out.",)
    INPUTS: ClassVar[dict[str, Any]] = {
        "a": ("INT", {"default": 1, "min": 0, "max": 2, "tooltip": "A number of frames."})
    }

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": cls.INPUTS, "hidden": {"unique_id": "UNIQUE_ID"}}

    def run(self) -> None:
        """Does nothing."""


def variant(**changes: Any) -> type:
    return type("Variant", (GoodNode,), changes)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "FastARGood.md").write_text("`a` is the input, `latent` the output", encoding="utf-8")
    return tmp_path


def test_a_good_node_has_no_faults(docs: Path) -> None:
    assert node_faults("FastARGood", "FAST-AR Good", GoodNode, docs) == []


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"CATEGORY": "video"}, "the category"),
        ({"DESCRIPTION": ""}, "no DESCRIPTION"),
        ({"FUNCTION": "walk"}, "no method"),
        ({"RETURN_NAMES": ()}, "RETURN_NAMES"),
        ({"OUTPUT_TOOLTIPS": ("x", "y")}, "OUTPUT_TOOLTIPS"),
        ({"INPUTS": {"a": ("MODEL",)}}, "input a has no tooltip"),
        ({"INPUTS": {"a": ("MODEL", {"tooltip": "model"})}}, "input a has no tooltip"),
        ({"INPUTS": {"a": ("FLOAT", {"default": 1, "tooltip": "A share between 0 and 1."})}}, "min or max"),
        ({"INPUTS": {"b": ("MODEL", {"tooltip": "The video model."})}}, "does not mention `b`"),
    ],
)
def test_a_faulty_node_is_caught(docs: Path, changes: dict[str, Any], fault: str) -> None:
    faults = node_faults("FastARGood", "FAST-AR Good", variant(**changes), docs)
    assert any(fault in line for line in faults), faults


def test_a_foreign_name_and_a_missing_page_are_caught(docs: Path) -> None:
    assert len(node_faults("Good", "Good", GoodNode, docs)) == 3


def test_all_published_nodes_are_there(host: Host) -> None:
    assert set(host.nodes) >= PUBLISHED


def test_every_node_explains_itself(host: Host) -> None:
    faults = [
        fault for node_id, cls in host.nodes.items() for fault in node_faults(node_id, cls.DISPLAY_NAME, cls, DOCS)
    ]
    assert faults == []


def test_every_help_page_belongs_to_a_node(host: Host) -> None:
    assert {page.stem for page in DOCS.glob("*.md")} <= set(host.nodes)
