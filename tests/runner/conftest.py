"""Makes the runner importable as `_runner`, and starts one real server for the tests that need one."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from run_parts.setup import load_runner

load_runner()

from _runner import locate, paths, provision, server, talk  # noqa: E402

HERE = Path(__file__).parent


@pytest.fixture
def cache(tmp_path: Path) -> paths.Cache:
    """An empty cache folder."""
    return paths.Cache(tmp_path / "cache")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads the variables of this machine or writes to its cache."""
    monkeypatch.setenv(paths.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv(locate.HOST_VARIABLE, raising=False)


def comfyui_under_test() -> Path:
    """What FASTAR_TEST_HOST names; skips the test without it."""
    named = os.environ.get("FASTAR_TEST_HOST")
    if not named:
        pytest.skip("FASTAR_TEST_HOST is not set to a ComfyUI checkout")
    return Path(named)


@pytest.fixture(scope="session")
def host_folder() -> Path:
    """The ComfyUI under test."""
    return comfyui_under_test()


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The same for tests of the runner alone: by their fixture's name they are left out of the lanes of other hosts."""
    return comfyui_under_test()


@pytest.fixture(scope="session")
def host_server(host_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Server]:
    """A running server with this pack and the nodes of helper_nodes.py; everything it writes lies in a test folder."""
    base = tmp_path_factory.mktemp("server")
    helper = base / "nodes" / "custom_nodes" / "helper"
    helper.mkdir(parents=True)
    shutil.copyfile(HERE / "helper_nodes.py", helper / "__init__.py")
    (base / "nodes" / "paths.yaml").write_text('helper:\n    custom_nodes: "custom_nodes"\n', encoding="utf-8")
    cache = paths.Cache(base / "cache")
    for name in ("output", "input"):
        (base / name).mkdir()
    arguments = ["--cpu", "--disable-api-nodes", "--output-directory", str(base / "output")]
    arguments += ["--input-directory", str(base / "input"), "--front-end-root", str(cache.made("no-frontend"))]
    configs = [base / "nodes" / "paths.yaml", provision.extra_paths(paths.PACK_ROOT, cache.made("packs"))]
    for config in configs:
        arguments += ["--extra-model-paths-config", str(config)]
    python = locate.Python(Path(sys.executable), ())
    prepared = provision.Prepared(
        host_folder, locate.version_of(host_folder), python, False, tuple(arguments), base / "output", "under test"
    )
    with server.Server(prepared, cache, talk.Talk()) as running:
        yield running
