"""Counts the frames of an mp4 file from its tables, for plain and for fragmented files."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_VIDEO = b"vide"


def _boxes(data: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    at = 0
    while at + 8 <= len(data):
        size, kind = struct.unpack_from("!I4s", data, at)
        head = 8
        if size == 1 and at + 16 <= len(data):
            size, head = struct.unpack_from("!Q", data, at + 8)[0], 16
        elif size == 0:
            size = len(data) - at
        if size < head or at + size > len(data):
            return  # the tail of a file whose writer was killed
        yield kind, data[at + head : at + size]
        at += size


def _children(data: memoryview, *path: bytes) -> Iterator[memoryview]:
    for kind, body in _boxes(data):
        if kind == path[0]:
            if len(path) == 1:
                yield body
            else:
                yield from _children(body, *path[1:])


def _tables(path: Path) -> Iterator[tuple[bytes, memoryview]]:
    """The top-level boxes that hold tables; the media data is skipped without being read."""
    end = path.stat().st_size
    with path.open("rb") as stream:
        at = 0
        while at + 8 <= end:
            stream.seek(at)
            head = stream.read(16)
            size, kind = struct.unpack_from("!I4s", head)
            skip = 8
            if size == 1 and len(head) == 16:
                size, skip = struct.unpack_from("!Q", head, 8)[0], 16
            size = size or end - at
            if size < skip or at + size > end:
                return
            if kind in (b"moov", b"moof"):
                stream.seek(at + skip)
                yield kind, memoryview(stream.read(size - skip))
            at += size


def video_frames(path: Path) -> int | None:
    """Number of frames of the first video track, None when the file is no mp4 with one. A cut-off tail is left out."""
    track, frames = None, 0
    for kind, body in _tables(path):
        if kind == b"moov":
            for trak in _children(body, b"trak"):
                handlers = [bytes(box[8:12]) for box in _children(trak, b"mdia", b"hdlr")]
                if _VIDEO not in handlers or track is not None:
                    continue
                head = next(_children(trak, b"tkhd"))
                track = struct.unpack_from("!I", head, 20 if head[0] == 1 else 12)[0]
                for table in _children(trak, b"mdia", b"minf", b"stbl", b"stsz"):
                    frames += struct.unpack_from("!I", table, 8)[0]
        else:
            for traf in _children(body, b"traf"):
                owners = [struct.unpack_from("!I", box, 4)[0] for box in _children(traf, b"tfhd")]
                if track is not None and track in owners:
                    frames += sum(struct.unpack_from("!I", run, 4)[0] for run in _children(traf, b"trun"))
    return frames if track is not None else None
