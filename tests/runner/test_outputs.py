"""What a run left: which files, where they go, and the report."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from _runner.api import HttpError
from _runner.errors import Exit, RunnerError
from _runner.outputs import Output, check_target, count_frames, find_outputs, find_report, save_outputs
from _runner.talk import Talk

pytestmark = pytest.mark.cpu

HISTORY: dict[str, dict[str, Any]] = {
    "5": {"images": [{"filename": "p.png", "subfolder": "", "type": "temp"}], "animated": [False]},
    "3": {"images": [{"filename": "a.png", "subfolder": "s", "type": "output"}], "text": ["filename"]},
    "4": {"images": [{"filename": "v.mp4", "subfolder": "s", "type": "output"}], "animated": [True]},
    "2": {"fastar_report": ['{"frames": 81}'], "gifs": [{"filename": "v.mp4", "subfolder": "s", "type": "output"}]},
}


class FakeApi:
    """Serves one file; knows nothing else."""

    def download(self, query: dict[str, str], target: Path) -> None:
        if query["filename"] != "v.mp4":
            target.write_bytes(b"half")
            raise HttpError(404, "not found")
        target.write_bytes(b"video from the server")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    folder = tmp_path / "output"
    (folder / "s").mkdir(parents=True)
    (folder / "s" / "v.mp4").write_bytes(b"video")
    (folder / "s" / "a.png").write_bytes(b"picture")
    return folder


def save(target: Path | None, local: Path | None, outputs: list[Output] | None = None) -> tuple[list[Path], str]:
    stream = io.StringIO()
    found = find_outputs(HISTORY) if outputs is None else outputs
    return save_outputs(found, target, local, FakeApi(), Talk(stream=stream)), stream.getvalue()  # type: ignore[arg-type]


def test_kept_files_come_first_and_videos_before_pictures() -> None:
    assert [output.filename for output in find_outputs(HISTORY)] == ["v.mp4", "a.png", "p.png"]


def test_the_report_is_read() -> None:
    assert find_report(HISTORY) == {"frames": 81}
    assert find_report({"1": {"fastar_report": ["no json"]}}) == "no json"
    assert find_report({"1": {"fastar_report": ["1"]}, "2": {"fastar_report": ["2"]}}) == [1, 2]
    assert find_report({"1": {"images": []}}) is None


def test_without_a_target_the_files_stay_where_they_are(local: Path) -> None:
    saved, _ = save(None, local)
    assert saved == [local / "s" / "v.mp4", local / "s" / "a.png"]


def test_a_file_takes_the_video(local: Path, tmp_path: Path) -> None:
    target = tmp_path / "mine.mp4"
    target.write_bytes(b"old")
    saved, said = save(target, local)
    assert saved == [target]
    assert target.read_bytes() == b"video"
    assert "2 files" in said


def test_a_folder_takes_everything_and_overwrites_nothing(local: Path, tmp_path: Path) -> None:
    target = tmp_path / "results"
    save(target, local)
    saved, _ = save(target, local)
    assert [path.name for path in saved] == ["v_2.mp4", "a_2.png"]
    assert (target / "v.mp4").read_bytes() == b"video"
    assert not list(target.glob("*.part"))


def test_another_machines_files_are_fetched(tmp_path: Path) -> None:
    saved, _ = save(tmp_path / "mine.mp4", None)
    assert saved[0].read_bytes() == b"video from the server"
    saved, said = save(None, None)
    assert saved == []
    assert "output/s/v.mp4" in said


def test_a_file_that_cannot_be_had_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RunnerError, match="404") as caught:
        save(tmp_path / "x.png", None, [Output("a.png", "", "output")])
    assert caught.value.code == Exit.NO_OUTPUT
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_files_is_an_error(local: Path) -> None:
    with pytest.raises(RunnerError, match="no file") as caught:
        save(None, local, [])
    assert caught.value.code == Exit.NO_OUTPUT


def test_names_from_a_server_stay_in_the_folder(tmp_path: Path) -> None:
    class Evil(FakeApi):
        def download(self, query: dict[str, str], target: Path) -> None:
            target.write_bytes(b"x")

    target = tmp_path / "a" / "b"
    saved = save_outputs([Output("../../evil.png", "", "output")], target, None, Evil(), Talk())  # type: ignore[arg-type]
    assert saved == [target / "evil.png"]


def test_an_impossible_target_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(RunnerError, match="--output"):
        check_target(tmp_path / "file" / "x.mp4")
    check_target(tmp_path / "new" / "x.mp4")
    assert (tmp_path / "new").is_dir()


def test_a_locked_target_is_refused_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(RunnerError, match="cannot be written to; choose another folder"):
        check_target(tmp_path / "x.mp4")


def test_frames_come_from_the_report_when_there_is_no_mp4(tmp_path: Path) -> None:
    assert count_frames([], {"frames": {"latent": 21, "computed": 81, "delivered": 80}}) == 80
    assert count_frames([], [{"frames": {"delivered": 80}}] * 2) is None
    assert count_frames([tmp_path / "a.png", tmp_path / "b.png"], None) == 2
    assert count_frames([], None) is None
