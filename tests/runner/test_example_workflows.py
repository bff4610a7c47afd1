"""The example workflows against /object_info of a real server."""

from __future__ import annotations

from typing import Any

import pytest
from _runner import ui_convert
from _runner.graph import known_workflows, load_workflow
from _runner.server import Server

from workflows.build import BUILT_WITH, build

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def info(host_server: Server) -> dict[str, Any]:
    return host_server.api.get("/object_info")


def test_they_are_what_the_server_describes(host_server: Server, info: dict[str, Any]) -> None:
    if not host_server.api.version().startswith(BUILT_WITH):
        pytest.skip(f"the files are built with ComfyUI {BUILT_WITH}x, the oldest supported")
    for name, text in build(info).items():
        stem = name.removeprefix("api/").removesuffix(".json")
        (path,) = (path for path in known_workflows()[stem] if (path.parent.name == "api") == name.startswith("api/"))
        assert path.read_text(encoding="utf-8") == text, "run: python -m workflows.build"


def test_both_forms_are_one_workflow(info: dict[str, Any]) -> None:
    for api, ui in known_workflows().values():
        assert ui_convert.to_api(load_workflow(ui).ui or {}, info) == load_workflow(api).prompt
