"""A real host loads the pack from custom_nodes under any folder name and lists the demo files behind the user's own."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quality.blocked import BREAKAGES, block
from tests_support import PACK_ROOT, Host

pytestmark = pytest.mark.cpu

CODE = ("nodes", "fastar_core", "kernels")
CATEGORIES = ("diffusion_models", "fastar_demo")


@pytest.fixture
def stock(host: Host, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The host's own `nodes` module and folder list, which forget at the end of the test what was loaded in it."""
    import folder_paths

    import nodes

    loaded = set(sys.modules)
    for name in ("NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "EXTENSION_WEB_DIRS"):
        monkeypatch.setattr(nodes, name, dict(getattr(nodes, name)))
    listed = {kind: (list(paths), set(ends)) for kind, (paths, ends) in folder_paths.folder_names_and_paths.items()}
    monkeypatch.setattr(folder_paths, "folder_names_and_paths", listed)
    yield nodes
    for name in set(sys.modules) - loaded:
        if str(host.base).replace(".", "_x_") in name:
            del sys.modules[name]


def install(host: Host, name: str) -> Path:
    """Copy the pack into the host's custom_nodes, with one small file in place of the demo models."""
    folder = host.base / "custom_nodes" / name
    for part in CODE:
        shutil.copytree(PACK_ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("__init__.py", "pyproject.toml"):
        shutil.copy(PACK_ROOT / part, folder)
    for category in CATEGORIES:
        models = folder / "example_workflows" / "models" / category
        models.mkdir(parents=True)
        (models / f"{category}.safetensors").write_bytes(b"demo")
    return folder


@pytest.mark.parametrize("name", ["ComfyUI-FAST-AR", "fast_ar (copy)", "v0.1.0 of it", "nodes"])
def test_any_folder_name_will_do(host: Host, stock: Any, caplog: pytest.LogCaptureFixture, name: str) -> None:
    folder = install(host, name)
    with caplog.at_level(logging.INFO):
        assert asyncio.run(stock.load_custom_node(str(folder)))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    for node_id, cls in host.nodes.items():
        loaded = stock.NODE_CLASS_MAPPINGS[node_id]
        assert loaded is not cls
        assert Path(sys.modules[loaded.__module__].__file__ or "").is_relative_to(folder)
        assert stock.NODE_DISPLAY_NAME_MAPPINGS[node_id] == cls.DISPLAY_NAME
    assert Path(stock.EXTENSION_WEB_DIRS[name]) == folder / "nodes" / "web"


@pytest.mark.parametrize("error", BREAKAGES, ids=lambda error: type(error).__name__)
def test_all_nodes_are_there_without_optional_libraries(
    host: Host, stock: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    block(monkeypatch, error, "triton", "flashinfer")
    folder = install(host, f"without_{type(error).__name__}")
    assert asyncio.run(stock.load_custom_node(str(folder)))
    assert set(host.nodes) <= set(stock.NODE_CLASS_MAPPINGS)


def test_without_a_pack_module_the_rest_loads(host: Host, stock: Any, caplog: pytest.LogCaptureFixture) -> None:
    folder = install(host, "with_a_broken_module")
    (folder / "nodes" / "prompts.py").write_text("raise OSError('no such DLL')", encoding="utf-8")
    assert asyncio.run(stock.load_custom_node(str(folder)))
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "'prompts'" in record.getMessage()
    assert "no such DLL" in record.getMessage()
    assert stock.NODE_CLASS_MAPPINGS.keys() >= set(host.nodes) - {"FastARPrompts"}


def test_demo_files_stand_behind_the_users_own(host: Host, stock: Any) -> None:
    import folder_paths

    before = {kind: list(paths) for kind, (paths, _) in folder_paths.folder_names_and_paths.items()}
    name = "diffusion_models.safetensors"
    own = host.base / "models" / "diffusion_models" / name
    own.parent.mkdir(exist_ok=True)
    own.write_bytes(b"the user's")
    folder = install(host, "twice")
    for _ in range(2):
        assert asyncio.run(stock.load_custom_node(str(folder)))
    models = folder / "example_workflows" / "models"
    after = {kind: paths for kind, (paths, _) in folder_paths.folder_names_and_paths.items()}
    assert after == before | {kind: [*before[kind], str(models / kind)] for kind in CATEGORIES}
    assert Path(folder_paths.get_full_path("diffusion_models", name) or "") == own
    own.unlink()
    assert Path(folder_paths.get_full_path("diffusion_models", name) or "") == models / "diffusion_models" / name


def test_each_loader_lists_only_its_own_demo_files(host: Host, stock: Any) -> None:
    import folder_paths

    folder = install(host, "lists")
    (folder / "example_workflows" / "models" / "fastar_demo" / "card.md").write_text("no weights", encoding="utf-8")
    assert asyncio.run(stock.load_custom_node(str(folder)))
    listed = {kind: folder_paths.get_filename_list(kind) for kind in CATEGORIES}
    assert "diffusion_models.safetensors" in listed["diffusion_models"]
    assert "fastar_demo.safetensors" in listed["fastar_demo"]
    assert "fastar_demo.safetensors" not in listed["diffusion_models"]
    assert not {"diffusion_models.safetensors", "card.md"} & set(listed["fastar_demo"])


def test_the_weights_of_the_pack_lie_where_a_loader_looks() -> None:
    models = PACK_ROOT / "example_workflows" / "models"
    stray = [path for path in models.rglob("*.safetensors") if path.parent.name not in CATEGORIES]
    assert stray == [], f"weights belong into {' or '.join(CATEGORIES)} below {models.name}, see nodes/host/folders.py"
