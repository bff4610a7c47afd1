"""Frames are counted from the tables of plain, fragmented and cut-off files."""

from __future__ import annotations

from pathlib import Path

import pytest
from _runner.mp4 import video_frames

pytestmark = pytest.mark.cpu

FRAMES = 23


def write_video(path: Path, audio: bool = False, **options: str) -> None:
    av = pytest.importorskip("av")
    np = pytest.importorskip("numpy")
    with av.open(str(path), "w", options=options) as file:
        sound = file.add_stream("aac", rate=16000) if audio else None
        stream = file.add_stream("libx264", rate=8)
        stream.width = stream.height = 32
        stream.gop_size = 5
        for number in range(FRAMES):
            picture = np.full((32, 32, 3), number * 10, dtype=np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        if sound is not None:
            noise = av.AudioFrame.from_ndarray(np.zeros((1, 16000), dtype=np.float32), format="fltp", layout="mono")
            noise.sample_rate = 16000
            file.mux(sound.encode(noise))
            file.mux(sound.encode(None))
        file.mux(stream.encode(None))


@pytest.mark.parametrize("flags", ["", "faststart", "frag_keyframe+empty_moov", "frag_every_frame+empty_moov"])
@pytest.mark.parametrize("audio", [False, True])
def test_frames_are_counted(tmp_path: Path, flags: str, audio: bool) -> None:
    path = tmp_path / "x.mp4"
    write_video(path, audio, **({"movflags": flags} if flags else {}))
    assert video_frames(path) == FRAMES


def test_a_cut_off_file_counts_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.mp4"
    write_video(path, movflags="frag_keyframe+empty_moov")
    data = path.read_bytes()
    path.write_bytes(data[: data.rindex(b"moof") + 40])
    assert 0 < (video_frames(path) or 0) < FRAMES


@pytest.mark.parametrize("data", [b"", b"no video at all", b"\0\0\0\0moov", b"\x00\x00\x00\x08free"])
def test_other_files_have_none(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.mp4"
    path.write_bytes(data)
    assert video_frames(path) is None
