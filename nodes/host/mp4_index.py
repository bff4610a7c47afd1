"""Turns a fragmented mp4 into an ordinary one when it is complete, without touching the pictures in it.

Fragments make a file that plays after a crash, but editors and parts of the host want the frame table of an ordinary
file. So the complete table goes behind the last fragment, and the short header in front becomes part of the data.
Until that last change of 16 bytes the file is a valid fragmented one.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator

_PARENTS = (b"moov", b"trak", b"mdia", b"minf", b"stbl")
# place of the duration in a box, by version: (offset, layout)
_DURATION = {b"mvhd": {0: (24, ">I"), 1: (32, ">Q")}, b"tkhd": {0: (28, ">I"), 1: (36, ">Q")},
             b"mdhd": {0: (24, ">I"), 1: (32, ">Q")}}


def boxes(data: bytes | bytearray, start: int = 0, end: int | None = None) -> Iterator[tuple[bytes, int, int]]:
    """(kind, start, end) of the mp4 boxes that lie side by side in data[start:end]."""
    end = len(data) if end is None else end
    while start < end:
        size, kind = struct.unpack_from(">I4s", data, start)
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, start + 8)
        yield kind, start, start + size
        start += size


def find(data: bytes | bytearray, *path: bytes) -> int:
    """Offset of the box at `path`, for example moov, trak, mdia. Raises ValueError when there is none."""
    start, end = 0, len(data)
    for step, kind in enumerate(path):
        first = start + (8 if step else 0)
        found = next(((s, e) for k, s, e in boxes(data, first, end) if k == kind), None)
        if found is None:
            raise ValueError(f"the mp4 muxer wrote no box {b'/'.join(path).decode()}")
        start, end = found
    return start


def sample_sizes(fragment: bytes | bytearray) -> list[int]:
    """Bytes of every frame of a fragment of one track, as its run tables tell them."""
    track = find(fragment, b"moof", b"traf")
    (track_size,) = struct.unpack_from(">I", fragment, track)
    default, sizes = 0, []
    for kind, start, _ in boxes(fragment, track + 8, track + track_size):
        if kind == b"tfhd":
            (flags,) = struct.unpack_from(">I", fragment, start + 8)
            skipped = sum(size for bit, size in ((1, 8), (2, 4), (8, 4)) if flags & bit)
            default = struct.unpack_from(">I", fragment, start + 16 + skipped)[0] if flags & 0x10 else 0
        elif kind == b"trun":
            flags, count = struct.unpack_from(">II", fragment, start + 8)
            flags &= 0xFFFFFF  # the top byte is the version
            at = start + 16 + 4 * bool(flags & 1) + 4 * bool(flags & 4) + 4 * bool(flags & 0x100)
            step = 4 * sum(bool(flags & bit) for bit in (0x100, 0x200, 0x400, 0x800))
            listed = flags & 0x200
            sizes += [struct.unpack_from(">I", fragment, at + i * step)[0] if listed else default for i in range(count)]
    return sizes


class FrameTable:
    """Where every frame lies: byte counts, key frames, and the file offset and frame count of each fragment's data."""

    def __init__(self, frame_ticks: int) -> None:
        self.frame_ticks = frame_ticks
        self.sizes = array("I")
        self.keyframes = array("I")  # frame numbers from 1
        self.offsets = array("Q")
        self.counts = array("I")

    def add(self, offset: int, sizes: list[int], keys: list[bool]) -> None:
        """One fragment whose picture data starts at `offset` in the file."""
        self.keyframes.extend(len(self.sizes) + place + 1 for place, key in enumerate(keys) if key)
        self.sizes.extend(sizes)
        self.offsets.append(offset)
        self.counts.append(len(sizes))

    def boxes(self) -> list[bytes]:
        """The sample table boxes of an ordinary file."""
        runs: list[tuple[int, int]] = []  # (first chunk, frames per chunk) wherever the count changes
        for chunk, count in enumerate(self.counts, 1):
            if not runs or runs[-1][1] != count:
                runs.append((chunk, count))
        return [
            _full(b"stts", struct.pack(">III", 1, len(self.sizes), self.frame_ticks)),
            _full(b"stss", _counted(self.keyframes)),
            _full(b"stsc", struct.pack(">I", len(runs)) + b"".join(struct.pack(">III", *run, 1) for run in runs)),
            _full(b"stsz", struct.pack(">I", 0) + _counted(self.sizes)),
            _full(b"co64", _counted(self.offsets)),
        ]


def _box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I4s", 8 + len(content), kind) + content


def _full(kind: bytes, content: bytes) -> bytes:
    return _box(kind, bytes(4) + content)


def _counted(values: array[int]) -> bytes:
    """Entry count and entries, big endian."""
    return struct.pack(f">I{len(values)}{'Q' if values.typecode == 'Q' else 'I'}", len(values), *values)


def complete_header(header: bytes, table: FrameTable) -> bytes:
    """The `moov` box of the whole file, from the header of the fragmented one and the frame table."""
    movie, media = find(header, b"moov", b"mvhd"), find(header, b"moov", b"trak", b"mdia", b"mdhd")
    scales = [struct.unpack_from(">I", header, at + (28 if header[at + 8] == 1 else 20))[0] for at in (movie, media)]
    ticks = len(table.sizes) * table.frame_ticks
    in_movie = -(-ticks * scales[0] // scales[1])
    durations = {b"mvhd": in_movie, b"tkhd": in_movie, b"mdhd": ticks}

    def rebuild(kind: bytes, start: int, end: int) -> bytes:
        if kind == b"stbl":
            described = next(header[s:e] for k, s, e in boxes(header, start + 8, end) if k == b"stsd")
            return _box(kind, described + b"".join(table.boxes()))
        if kind in _PARENTS:  # `mvex` says that fragments follow: not any more
            return _box(kind, b"".join(rebuild(k, s, e) for k, s, e in boxes(header, start + 8, end) if k != b"mvex"))
        piece = bytearray(header[start:end])
        if kind in durations:
            offset, layout = _DURATION[kind][piece[8]]
            struct.pack_into(layout, piece, offset, durations[kind])
        return bytes(piece)

    return rebuild(b"moov", find(header, b"moov"), len(header))


def skipped(fragment: bytes) -> bytes:
    """The fragment disguised as one box that players skip; its true first 8 bytes, written over it, make it count."""
    return struct.pack(">I4s", len(fragment), b"free") + fragment[8:]


def data_cover(header: bytes, end: int) -> tuple[int, bytes]:
    """(offset, 16 bytes) to write there: makes everything from the old `moov` up to `end` one data box."""
    start = find(header, b"moov")
    return start, struct.pack(">I4sQ", 1, b"mdat", end - start)
