"""A running ComfyUI 0.3.75 with its web interface, and one pass of Chromium through it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from run_parts.setup import load_runner
from tests_support import PACK_ROOT

load_runner()

from _runner import link, locate, paths, provision, server, talk  # noqa: E402

HERE = Path(__file__).parent
WORKFLOWS = PACK_ROOT / "example_workflows"
FRONTEND = "FASTAR_FRONTEND"  # a folder with another web interface than the one in this Python
PICTURES = "FASTAR_PICTURES"  # a folder in which the pictures stay
LENGTH, TIMEOUT_S = 13, 120
NAMES = tuple(sorted(path.stem for path in WORKFLOWS.glob("*.json")))


def _needed(variable: str) -> str:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set; tests/run.py --lane browser sets it")
    return value


@pytest.fixture(scope="session")
def web_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[server.Server]:
    """A server with this pack, previews switched on; everything it writes lies in a test folder."""
    folder = Path(_needed("FASTAR_TEST_HOST"))
    base = tmp_path_factory.mktemp("web")
    cache = paths.Cache(base / "cache")
    arguments = ["--cpu", "--disable-api-nodes", "--preview-method", "latent2rgb"]
    for name in ("output", "input"):
        (base / name).mkdir()
        arguments += [f"--{name}-directory", str(base / name)]
    arguments += ["--extra-model-paths-config", str(provision.extra_paths(PACK_ROOT, cache.made("packs")))]
    if os.environ.get(FRONTEND):
        arguments += ["--front-end-root", os.environ[FRONTEND]]
    python = locate.Python(Path(sys.executable), ())
    version = locate.version_of(folder)
    prepared = provision.Prepared(folder, version, python, False, tuple(arguments), base / "output", "under test")
    with server.Server(prepared, cache, talk.Talk()) as running:
        yield running


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the screenshots go."""
    named = os.environ.get(PICTURES)
    folder = Path(named) if named else tmp_path_factory.mktemp("pictures")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def seen(web_host: server.Server, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one pass of pass.mjs saw; it fails here when the pass did not get to its end."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node.js, which playwright-core needs")
    settings = {
        "playwright": _needed("FASTAR_PLAYWRIGHT"),
        "chromium": _needed("FASTAR_CHROMIUM"),
        "url": web_host.api.address,
        "timeout_ms": TIMEOUT_S * 500,
        "pack": link.NAME,
        "workflow": "demo_text_to_video",
        "workflows": {n: json.loads((WORKFLOWS / f"{n}.json").read_text(encoding="utf-8")) for n in NAMES},
        "sampler": "FastARStreamingSampler",
        "widgets": {"length": LENGTH},
        "pictures": str(pictures),
        "help": "Makes a video block by block. Each block is denoised with everything",
    }
    file = tmp_path_factory.mktemp("pass") / "settings.json"
    file.write_text(json.dumps(settings), encoding="utf-8")
    command = [node, str(HERE / "pass.mjs"), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=2 * TIMEOUT_S, check=False)
    if done.returncode != 0:
        pytest.fail(f"the browser pass ended with {done.returncode}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "failure" in result:
        pytest.fail(f"the browser pass stopped in {result['failure']}\n{result['errors']}\n{web_host.last_words()}")
    return {**result, "pack": link.NAME}
