"""What is on the disk after the process was killed, and after the disk was full."""

from __future__ import annotations

import io
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import pytest

from tests_support import Host
from video.frames import numbered, numbers, times

pytestmark = pytest.mark.cpu
WRITER = Path(__file__).with_name("writer.py")


def writer(host: Host, base: Path, limit: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(WRITER), str(host.path), str(base), limit]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_a_killed_run_leaves_every_finished_block(host: Host, tmp_path: Path) -> None:
    child = writer(host, tmp_path, "tear")
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line.strip())
        if lines[-1] == "torn":
            break
    child.kill()
    child.wait()
    child.stdout.close()
    assert [line.split()[0] for line in lines] == ["12", "24", "36", "torn"]
    path = Path(lines[2].split(maxsplit=1)[1])
    assert path.is_relative_to(tmp_path / "output" / "video")
    assert numbers(path) == list(range(36))
    assert times(path) == [frame / 16 for frame in range(36)]
    with av.open(str(path)) as container:
        assert container.metadata["prompt"] == '{"1": {}}'


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits exist on POSIX systems only")
def test_a_full_disk_loses_no_finished_block(host: Host, tmp_path: Path) -> None:
    output, _ = writer(host, tmp_path, "20000").communicate(timeout=120)
    lines = output.splitlines()
    *blocks, error = [line for line in lines if line[0].isdigit() or line.startswith("error")]
    count, path = blocks[-1].split(maxsplit=1)
    assert 24 <= int(count) < 480
    assert numbers(path) == list(range(int(count)))
    size = Path(path).stat().st_size
    assert size <= 20000
    for words in (path, f"{count} frames", "File too large", "shorter length", "--output-directory"):
        assert words in error


def test_ordinary_writers_would_have_lost_frames(tmp_path: Path) -> None:
    """The wrong variants: a plain mp4 without its end does not open; fragments that libav ends by itself lag behind."""
    frames = numbered(0, 36)
    found = {}
    for name, flags in (("plain", ""), ("fragments", "empty_moov+frag_keyframe")):
        buffer = io.BytesIO()
        container = av.open(buffer, "w", format="mp4", options={"movflags": flags} if flags else {})
        stream = container.add_stream("libx264", rate=Fraction(16))
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for frame in frames:
            picture = av.VideoFrame.from_ndarray((frame * 255).byte().numpy(), format="rgb24")
            container.mux(stream.encode(picture.reformat(format="yuv420p")))
        path = tmp_path / f"{name}.mp4"
        path.write_bytes(buffer.getvalue())
        try:
            found[name] = len(numbers(path))
        except (av.error.FFmpegError, IndexError):
            found[name] = 0
        container.close()
    assert found["plain"] == 0
    assert found["fragments"] < 36
