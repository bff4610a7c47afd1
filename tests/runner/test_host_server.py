"""The runner against a real ComfyUI server, from the command line to the file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from _runner import cli, locate
from _runner.errors import Exit
from _runner.mp4 import video_frames
from _runner.paths import WORKFLOWS
from _runner.server import Server

from runner.test_convert import ui_node

pytestmark = pytest.mark.cpu

IMAGE = {"class_type": "EmptyImage", "inputs": {"width": 64, "height": 32, "batch_size": 9, "color": 255}}
VIDEO = {"class_type": "CreateVideo", "inputs": {"images": ["2", 0], "fps": 8.0}}
SAVE: dict[str, Any] = {
    "class_type": "SaveVideo",
    "inputs": {"video": ["3", 0], "filename_prefix": "runner/x", "format": "auto", "codec": "auto"},
}


def write(folder: Path, prompt: dict[str, Any], name: str = "flow") -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(prompt), encoding="utf-8")
    return str(path)


def slow(**inputs: Any) -> dict[str, Any]:
    widgets = {"image": ["1", 0], "steps": 3, "seed": 0, "pause": 0.0, "kind": "quick", "loud": False}
    return {"class_type": "TestSlow", "inputs": {**widgets, **inputs}, "_meta": {"title": "My sampler"}}


def run(server: Server, *arguments: str) -> int:
    return cli.main([*arguments, "--host", server.api.address])


def last_json(text: str) -> dict[str, Any]:
    return json.loads(text.splitlines()[-1])


def test_a_video_from_an_api_file(
    host_server: Server, host_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flow = write(tmp_path, {"1": IMAGE, "2": slow(), "3": VIDEO, "4": SAVE})
    target = tmp_path / "made" / "it.mp4"
    arguments = [flow, "--output", str(target), "--json", "--seed", "5", "--set", "My sampler.steps=4"]
    assert run(host_server, *arguments, "--set", "EmptyImage.batch_size=7", "--timeout", "60") == Exit.OK
    said = capsys.readouterr()
    result = last_json(said.out)
    assert len(said.out.splitlines()) == 1
    assert set(result) == {"workflow", "frames", "seconds", "outputs", "report", "host_version"}
    assert (result["workflow"], result["frames"], result["outputs"]) == ("flow", 7, [str(target)])
    assert result["host_version"] == locate.version_of(host_folder)
    assert video_frames(target) == 7
    assert "block 4/4 - frame 13/16" in said.err


def test_a_video_from_a_ui_file_carries_the_workflow(host_server: Server, tmp_path: Path) -> None:
    nodes = [
        ui_node(1, "EmptyImage", [64, 32, 5, 0], outputs=["IMAGE"]),
        ui_node(2, "TestSlow", [2, 9, "randomize", 0.0, "slow", True], [("image", "IMAGE", 1)], ["IMAGE"]),
        ui_node(5, "Reroute", [], [("", "*", 2)], ["IMAGE"]),
        ui_node(3, "CreateVideo", [8], [("images", "IMAGE", 3)], ["VIDEO"]),
        ui_node(4, "SaveVideo", ["runner/ui", "auto", "auto"], [("video", "VIDEO", 4)]),
    ]
    links = [[1, 1, 0, 2, 0, "IMAGE"], [2, 2, 0, 5, 0, "*"], [3, 5, 0, 3, 0, "*"], [4, 3, 0, 4, 0, "VIDEO"]]
    ui = {"nodes": nodes, "links": links, "version": 0.4}
    target = tmp_path / "ui.mp4"
    assert run(host_server, write(tmp_path, ui), "--output", str(target), "--set", "TestSlow.steps=3") == Exit.OK
    assert video_frames(target) == 5
    av = pytest.importorskip("av")
    with av.open(str(target)) as file:
        written = dict(file.metadata)
    assert json.loads(written["workflow"]) == ui
    prompt = json.loads(written["prompt"])
    assert prompt["2"]["inputs"] == {"image": ["1", 0], **slow()["inputs"], "seed": 9, "kind": "slow", "loud": True}


def test_a_report_is_handed_on(host_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = {"class_type": "TestReport", "inputs": {"image": ["1", 0]}}
    save = {"class_type": "SaveImage", "inputs": {"images": ["1", 0], "filename_prefix": "runner/p"}}
    flow = write(tmp_path, {"1": IMAGE, "2": report, "3": save})
    assert run(host_server, flow, "--json", "--output", str(tmp_path / "pictures")) == Exit.OK
    result = last_json(capsys.readouterr().out)
    assert result["report"] == {"frames": 9}
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 9 == len(result["outputs"])


def test_a_failing_node_is_named_with_its_message(
    host_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = {"class_type": "TestFailing", "inputs": {"image": ["1", 0]}, "_meta": {"title": "Breaks"}}
    flow = write(tmp_path, {"1": IMAGE, "2": failing, "3": VIDEO, "4": SAVE})
    assert run(host_server, flow, "--json") == Exit.FAILED
    said = capsys.readouterr()
    expected = (
        "'Breaks' (node 2, TestFailing) failed: the picture is 32 high: expected 7, change the height (ValueError)"
    )
    assert f"Error: {expected}" in said.err
    assert "Traceback" not in said.err + said.out
    assert last_json(said.out) == {"workflow": flow, "error": expected, "exit_code": 6}


def test_a_refused_workflow_names_node_and_input(
    host_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flow = write(tmp_path, {"1": IMAGE, "2": slow(kind="never", image=None), "3": VIDEO, "4": SAVE})
    assert run(host_server, flow) == Exit.REFUSED
    said = capsys.readouterr().err
    assert "'My sampler' (node 2, TestSlow): Value not in list: kind: 'never' not in ['quick', 'slow']" in said


def test_unknown_nodes_and_wrong_settings_end_before_the_run(
    host_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alien = write(tmp_path, {"1": {"class_type": "NoSuchNode", "inputs": {}}}, "alien")
    assert run(host_server, alien) == Exit.REFUSED
    assert "does not know these nodes: NoSuchNode" in capsys.readouterr().err
    flow = write(tmp_path, {"1": IMAGE, "2": slow(), "3": VIDEO, "4": SAVE})
    assert run(host_server, flow, "--set", "2.steps=0") == Exit.USAGE
    assert "expected 1 to 10000" in capsys.readouterr().err
    assert run(host_server, flow, "--frames", "5") == Exit.USAGE
    assert run(host_server, "no_such_workflow") == Exit.USAGE


def test_a_timeout_stops_the_run_on_the_server(
    host_server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flow = write(tmp_path, {"1": IMAGE, "2": slow(steps=1000, pause=0.1), "3": VIDEO, "4": SAVE})
    begin = time.monotonic()
    assert run(host_server, flow, "--timeout", "1") == Exit.TIMEOUT
    assert time.monotonic() - begin < 20
    assert host_server.api.get("/queue")["queue_running"] == []
    assert "--timeout 1" in capsys.readouterr().err


def test_nothing_answers_at_a_wrong_address(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flow = write(tmp_path, {"1": IMAGE})
    assert cli.main([flow, "--host", "http://127.0.0.1:9"]) == Exit.SERVER
    assert "no ComfyUI answers there" in capsys.readouterr().err


def command(host_folder: Path, cache: Path, *arguments: str) -> tuple[list[str], dict[str, str]]:
    environ = {**os.environ, "COMFYUI_PATH": str(host_folder), "FASTAR_CACHE": str(cache)}
    return [sys.executable, str(WORKFLOWS / "run.py"), *arguments, "--python", sys.executable], environ


def long_flow(folder: Path) -> str:
    """Stock nodes only: some minutes of scaling, with a chance to stop between the nodes."""
    prompt: dict[str, Any] = {"0": {**IMAGE, "inputs": {**IMAGE["inputs"], "batch_size": 4}}}
    for number in range(1, 400):
        size = 1024 if number % 2 else 768
        inputs = {"image": [str(number - 1), 0], "upscale_method": "lanczos", "width": size, "height": size}
        prompt[str(number)] = {"class_type": "ImageScale", "inputs": {**inputs, "crop": "disabled"}}
    prompt["end"] = {"class_type": "PreviewImage", "inputs": {"images": ["399", 0]}}
    return write(folder, prompt, "long")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX systems")
def test_ctrl_c_interrupts_the_run_and_stops_our_server(checkout: Path, tmp_path: Path) -> None:
    line, environ = command(checkout, tmp_path / "cache", long_flow(tmp_path), "--json")
    child = subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    logs, end = tmp_path / "cache" / "logs", time.monotonic() + 180
    while not any("got prompt" in log.read_text(encoding="utf-8") for log in logs.glob("server-*.log")):
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < end
        time.sleep(0.2)
    time.sleep(1)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == Exit.INTERRUPTED, err
    assert last_json(out)["exit_code"] == Exit.INTERRUPTED
    assert "Traceback" not in err
    log = next(logs.glob("server-*.log")).read_text(encoding="utf-8")
    assert "Processing interrupted" in log
    port = log.rsplit("127.0.0.1:", 1)[1].split()[0].strip("/")
    assert cli.Api(f"http://127.0.0.1:{port}").answers() is False


def test_one_command_starts_the_host_and_saves_the_video(host_folder: Path, tmp_path: Path) -> None:
    """The whole way, and nothing changes in the installation but that its output folder holds the result."""
    save = {**SAVE, "inputs": {**SAVE["inputs"], "filename_prefix": "fastar_runner_test"}}
    flow = write(tmp_path, {"2": IMAGE, "3": VIDEO, "4": save})
    target = tmp_path / "out.mp4"
    line, environ = command(host_folder, tmp_path / "cache", flow, "--output", str(target), "--json")
    before = snapshot(host_folder)
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = last_json(done.stdout)
    assert result["frames"] == 9 == video_frames(target)
    assert f"ComfyUI {locate.version_of(host_folder)} in {host_folder}" in done.stderr
    for path in snapshot(host_folder) - before:
        assert path.startswith("output/fastar_runner_test"), path
        (host_folder / path).unlink()


def snapshot(folder: Path) -> set[str]:
    """All files of an installation."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
