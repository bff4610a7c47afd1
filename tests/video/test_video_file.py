"""The growing video file: contents, times, names, metadata, and what happens when something is wrong."""

from __future__ import annotations

import errno
import importlib
import logging
import os
import struct
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import av
import pytest
import torch

from fastar_pack.fastar_core.errors import ConfigError, FastARError, GeometryError, UnsupportedError
from tests_support import Host
from video.frames import numbered, numbers, times

pytestmark = pytest.mark.cpu
BLOCKS = [9, 12, 1, 12, 40]  # the last holds a key frame in its middle


@pytest.fixture(scope="module")
def video_file(host: Host) -> ModuleType:
    return importlib.import_module("fastar_pack.nodes.host.video_file")


@pytest.fixture(scope="module")
def fragments(host: Host) -> ModuleType:
    return importlib.import_module("fastar_pack.nodes.host.fragments")


@pytest.fixture
def output(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import folder_paths

    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path))
    return tmp_path


def write(sink: Any, blocks: list[int], **size: int) -> None:
    first = sink.frames_written
    for count in blocks:
        sink.write(numbered(first, count, **size))
        first += count


@pytest.mark.parametrize("fps", [16, 23.976, 0.5, 1000, 29.97])
def test_the_file_plays_after_every_block_and_when_closed(video_file: ModuleType, output: Path, fps: float) -> None:
    sink = video_file.VideoSink("clip", 64, 48, fps)
    total = 0
    for count in BLOCKS:
        write(sink, [count])
        total += count
        assert numbers(sink.path) == list(range(total))
        assert sink.frames_written == total
    path = sink.close()
    assert path == output / "clip_00001_.mp4"
    assert numbers(path) == list(range(total))
    rate = Fraction(round(fps * 1000), 1000)
    assert times(path) == pytest.approx([float(i / rate) for i in range(total)], rel=1e-9)
    video = sink.as_video()
    assert video.get_dimensions() == (64, 48)
    assert video.get_frame_count() == total
    assert video.get_frame_rate() == rate
    assert video.get_duration() == pytest.approx(float(total / rate), abs=2e-3)
    assert video.get_components().images.shape == (total, 48, 64, 3)


def test_a_closed_file_is_an_ordinary_mp4(video_file: ModuleType, fragments: ModuleType, output: Path) -> None:
    sink = video_file.VideoSink("clip", 64, 48, 16)
    write(sink, BLOCKS)
    growing = [kind for kind, _, _ in fragments.boxes(Path(sink.path).read_bytes())]
    assert growing == [b"ftyp", b"moov"] + [b"moof", b"mdat"] * len(BLOCKS)
    data = Path(sink.close()).read_bytes()
    assert [kind for kind, _, _ in fragments.boxes(data)] == [b"ftyp", b"mdat", b"moov"]
    with av.open(str(sink.path)) as container:
        stream = container.streams.video[0]
        packets = [packet for packet in container.demux(stream) if packet.size]
        assert (stream.frames, stream.codec_context.name, stream.codec_context.pix_fmt) == (74, "h264", "yuv420p")
        keys = [packet.pts for packet in packets if packet.is_keyframe]
        assert 64 * packets[1].pts in keys
        container.seek(packets[70].pts, stream=stream)  # the key frames are known: seeking does not start at 0
        assert next(container.decode(stream)).pts == max(key for key in keys if key <= packets[70].pts)


def test_copied_by_the_hosts_save_video(video_file: ModuleType, output: Path) -> None:
    sink = video_file.VideoSink("clip", 64, 48, 16, prompt={"3": {"class_type": "X"}})
    write(sink, [9, 12])
    sink.close()
    copy = output / "copy.mp4"
    sink.as_video().save_to(str(copy))
    assert numbers(copy) == list(range(21))
    with av.open(str(copy)) as container:
        assert container.metadata["prompt"] == '{"3": {"class_type": "X"}}'


def host_metadata(host: Host, output: Path, prompt: Any, extra: Any) -> dict[str, str]:
    """Tags of a file that the host's own Save Video node makes from the same prompt."""
    from comfy_api.latest._input_impl import VideoFromComponents
    from comfy_api.latest._util import VideoComponents
    from comfy_extras.nodes_video import SaveVideo

    class Hidden:
        pass

    hidden = Hidden()
    hidden.prompt, hidden.extra_pnginfo = prompt, extra  # type: ignore[attr-defined]
    node = type("Node", (SaveVideo,), {"hidden": hidden})
    components = VideoComponents(images=numbered(0, 5), frame_rate=Fraction(16))
    node.execute.__func__(node, VideoFromComponents(components), "stock", "mp4", "h264")
    with av.open(str(output / "stock_00001_.mp4")) as container:
        return dict(container.metadata)


@pytest.mark.parametrize("disabled", [False, True])
def test_metadata_equals_the_hosts_save_video(
    host: Host, video_file: ModuleType, output: Path, monkeypatch: pytest.MonkeyPatch, disabled: bool
) -> None:
    from comfy.cli_args import args

    monkeypatch.setattr(args, "disable_metadata", disabled)
    prompt = {"1": {"inputs": {"text": 'Grüße, "quoted"\n\u96ea ' + "long " * 5000}, "class_type": "FastAR"}}
    extra = {"workflow": {"nodes": [1, 2.5, None]}, "other": "text"}
    stock = host_metadata(host, output, prompt, extra)
    sink = video_file.VideoSink("clip", 64, 48, 16, prompt, extra)
    write(sink, [5])
    growing = dict(av.open(str(sink.path)).metadata)
    sink.close()
    finished = dict(av.open(str(sink.path)).metadata)
    own = {"major_brand", "minor_version", "compatible_brands", "encoder"}
    for tags in (growing, finished):
        assert {k: v for k, v in tags.items() if k not in own} == {k: v for k, v in stock.items() if k not in own}
    assert ("prompt" in finished) != disabled


def test_names_count_up_and_nothing_is_overwritten(video_file: ModuleType, output: Path) -> None:
    (output / "video").mkdir()
    taken = output / "video" / "run_00007_.png"
    taken.write_bytes(b"mine")
    first, second, third = (video_file.VideoSink("video/run", 64, 48, 16) for _ in range(3))
    (output / "video" / "run_00008_.mp4").write_bytes(b"made meanwhile")
    for sink in (first, second):
        write(sink, [1])
        sink.close()
    assert [path.name for path in sorted((output / "video").iterdir())] == [
        "run_00007_.png", "run_00008_.mp4", "run_00009_.mp4", "run_00010_.mp4"]
    assert taken.read_bytes() == b"mine"
    assert (output / "video" / "run_00008_.mp4").read_bytes() == b"made meanwhile"
    assert third.close() is None  # nothing was written: no empty file
    with pytest.raises(FastARError, match="0 frames"):
        third.as_video()
    with pytest.raises(ConfigError, match=r"'../run', which lies outside the output folder"):
        video_file.VideoSink("../run", 64, 48, 16)


@pytest.mark.parametrize(("width", "height"), [(63, 48), (64, 47), (63, 47)])
def test_odd_sizes_are_widened_and_said(
    video_file: ModuleType, output: Path, caplog: pytest.LogCaptureFixture, width: int, height: int
) -> None:
    with caplog.at_level(logging.WARNING):
        sink = video_file.VideoSink("clip", width, height, 16)
    assert "64 x 48 instead of" in sink.note
    assert sink.note in caplog.text
    frames = torch.zeros(3, height, width, 3)
    frames[:, :, -1] = 1
    sink.write(frames)
    sink.close()
    images = sink.as_video().get_components().images
    assert images.shape == (3, 48, 64, 3)
    assert (images[:, :, width - 1:] > 0.9).all()  # the last column is repeated, none is lost
    assert (images[:, :, :width - 3] < 0.1).all()


class FullDisk:
    """A file on a disk that takes `room` more bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self.room = file, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        taken = self._file.write(bytes(data[:self.room]))
        self.room -= taken
        if taken < len(data) and not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return taken


@pytest.mark.parametrize("room", [0, 5, 300])
def test_a_full_disk_keeps_the_blocks_before(video_file: ModuleType, output: Path, room: int) -> None:
    sink = video_file.VideoSink("clip", 64, 48, 16)
    write(sink, [9, 12])
    size = Path(sink.path).stat().st_size
    sink._file = FullDisk(sink._file, room)
    with pytest.raises(FastARError, match=r"clip_00001_.*21 frames \(1\.3 s\) are safe.*free space") as caught:
        write(sink, [12])
    assert isinstance(caught.value.__cause__, OSError)
    assert Path(sink.path).stat().st_size == size
    assert sink.frames_written == 21
    assert numbers(sink.path) == list(range(21))
    assert sink.close() == sink.path
    assert sink.as_video().get_components().images.shape[0] == 21
    with pytest.raises(FastARError, match="closed already"):
        write(sink, [1])


@pytest.mark.parametrize("room", [0, 100])
def test_no_room_for_the_frame_table_is_no_error(
    video_file: ModuleType, output: Path, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    sink = video_file.VideoSink("clip", 64, 48, 16)
    write(sink, BLOCKS)
    sink._file = FullDisk(sink._file, room)
    with caplog.at_level(logging.WARNING):
        assert sink.close() == sink.path
    assert "all frames are in it" in caplog.text
    assert numbers(sink.path) == list(range(sum(BLOCKS)))


def test_without_x264_another_encoder_is_used_and_named(
    video_file: ModuleType, fragments: ModuleType, output: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fragments, "ENCODERS", ("libmissing264", "mpeg4"))
    with caplog.at_level(logging.WARNING):
        sink = video_file.VideoSink("clip", 64, 48, 16)
    assert "written with mpeg4" in caplog.text
    total = 0
    for count in BLOCKS:
        write(sink, [count])
        total += count
        assert numbers(sink.path) == list(range(total))
    sink.close()
    assert numbers(sink.path) == list(range(total))
    monkeypatch.setattr(fragments, "ENCODERS", ("libmissing264",))
    with pytest.raises(UnsupportedError, match="libmissing264.*reinstall"):
        video_file.VideoSink("clip", 64, 48, 16)


def test_a_locked_folder_is_refused_before_the_run(
    video_file: ModuleType, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != output or mode != os.W_OK)
    with pytest.raises(FastARError, match=r"no frame was written yet.*--output-directory"):
        video_file.VideoSink("clip", 64, 48, 16)
    assert list(output.iterdir()) == []


def test_wrong_frames_and_rates_are_refused(video_file: ModuleType, output: Path) -> None:
    sink = video_file.VideoSink("clip", 64, 48, 16)
    for shape in ((1, 64, 48, 3), (48, 64, 3), (1, 48, 64, 1)):
        with pytest.raises(GeometryError, match="64 x 48"):
            sink.write(torch.zeros(shape))
    sink.write(torch.zeros(0, 48, 64, 3))
    assert sink.path is None
    for fps in (0, -1, 1e6, float("nan")):
        with pytest.raises(ConfigError, match="change fps"):
            video_file.VideoSink("clip", 64, 48, fps)
    with pytest.raises(GeometryError, match="0 x 48"):
        video_file.VideoSink("clip", 0, 48, 16)


def test_the_frame_table_is_the_right_one(fragments: ModuleType) -> None:
    encoder = fragments.FragmentEncoder(64, 48, Fraction(16), {})
    data = encoder.header
    for first, count in ((0, 3), (3, 40)):
        data += encoder.encode(numbered(first, count))
    table = encoder.table
    assert list(table.counts) == [3, 40]
    assert table.keyframes[0] == 1
    assert 33 in table.keyframes  # two seconds
    for offset, sizes in zip(table.offsets, (table.sizes[:3], table.sizes[3:]), strict=True):
        assert struct.unpack_from(">I4s", data, offset - 8) == (sum(sizes) + 8, b"mdat")
    encoder.release()
