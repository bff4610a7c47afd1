"""Encodes frames to the pieces of a fragmented mp4: one header, then one self-contained fragment per call.

The muxer of libav ends a fragment only when the next packet arrives, so the last frames of a block would stay in
memory. Each block is therefore muxed on its own in memory; its fragment gets the right number and start time and can
be appended.
"""

from __future__ import annotations

import io
import logging
import struct
from collections.abc import Mapping
from fractions import Fraction

import av
import torch
from torch import Tensor

from ...fastar_core.errors import UnsupportedError
from .mp4_index import FrameTable, boxes, find, sample_sizes

logger = logging.getLogger(__name__)

ENCODERS = ("libx264", "libopenh264", "mpeg4")
KEYFRAME_SECONDS = 2
_HEADER_OPTIONS = "empty_moov+default_base_moof+use_metadata_tags"
_FRAGMENT_OPTIONS = "empty_moov+default_base_moof+frag_custom+skip_trailer"


class FragmentEncoder:
    """One video stream. `header` opens the file; every encode() gives bytes to append to it.

    width and height must be even (4:2:0 chroma). metadata: key -> text, stored as the host stores it.
    Raises UnsupportedError when PyAV has none of the encoders.
    """

    def __init__(self, width: int, height: int, rate: Fraction, metadata: Mapping[str, str]) -> None:
        self.rate = rate
        self.frames = 0  # handed to the encoder
        self.frames_out = 0  # contained in the fragments given out
        # a timescale that is a multiple of the rate keeps every frame time exact
        self._ticks = rate.denominator * max(1, -(-10_000 // rate.numerator))
        self._scale = self._ticks * rate
        self.table = FrameTable(self._ticks)
        failures = []
        for name in ENCODERS:
            try:
                self.header = self._open(name, width, height, metadata)
            except (av.error.FFmpegError, ValueError) as reason:  # PyAV's "no such codec" is a ValueError
                failures.append(f"{name}: {reason}")
                continue
            self.codec, self._position = name, len(self.header)
            break
        else:
            raise UnsupportedError(f"PyAV {av.__version__} can encode {width} x {height} video with none of "
                                   f"{', '.join(ENCODERS)} ({'; '.join(failures)}); reinstall the 'av' package of "
                                   "ComfyUI")
        if name != ENCODERS[0]:
            logger.warning("FAST-AR: this PyAV has no %s, the video is written with %s; some players cannot show it",
                           ENCODERS[0], name)

    def _open(self, name: str, width: int, height: int, metadata: Mapping[str, str]) -> bytes:
        """Start the encoder `name`; return the file header that the muxer makes for it."""
        av.codec.Codec(name, "w")
        buffer = io.BytesIO()
        options = {"movflags": _HEADER_OPTIONS, "video_track_timescale": str(self._scale)}
        container = av.open(buffer, "w", format="mp4", options=options)
        for key, text in metadata.items():
            container.metadata[key] = text
        stream = container.add_stream(name, rate=self.rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = max(1, round(KEYFRAME_SECONDS * self.rate))
        if name == "libx264":
            # no look-ahead, so that a block is complete when its last frame went in
            stream.options = {"tune": "zerolatency", "crf": "18"}
        else:
            stream.bit_rate = max(200_000, int(width * height * self.rate / 4))
        container.start_encoding()
        self._container, self._stream = container, stream  # the encoder lives as long as its container
        return buffer.getvalue()

    def encode(self, frames: Tensor) -> bytes:
        """frames [F, height, width, 3] in 0..1 on the CPU -> one fragment that holds them."""
        packets = []
        for frame in frames:
            pixels = (frame.float() * 255).round_().clamp_(0, 255).to(torch.uint8).contiguous().numpy()
            picture = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p")
            picture.pts, picture.time_base = self.frames, 1 / self.rate
            packets += self._stream.encode(picture)
            self.frames += 1
        return self._fragment(packets)

    def finish(self) -> bytes:
        """What the encoder still held back (nothing with libx264)."""
        return self._fragment(self._stream.encode(None)) if self.frames else b""

    def release(self) -> None:
        """Give the encoder's memory back."""
        self._container.close()

    def _fragment(self, packets: list[av.Packet]) -> bytes:
        if not packets:
            return b""
        buffer = io.BytesIO()
        options = {"movflags": _FRAGMENT_OPTIONS, "video_track_timescale": str(self._scale)}
        with av.open(buffer, "w", format="mp4", options=options) as container:
            stream = container.add_stream_from_template(self._stream, opaque=True)
            for position, packet in enumerate(packets):
                packet.stream = stream
                packet.time_base = 1 / self.rate
                packet.pts = packet.dts = position  # no encoder here reorders frames
                packet.duration = 1
                container.mux(packet)
        data = self._placed(buffer.getvalue())
        pictures = self._position + find(data, b"mdat") + 8
        self.table.add(pictures, sample_sizes(data), [packet.is_keyframe for packet in packets])
        self._position += len(data)
        self.frames_out += len(packets)
        return data

    def _placed(self, muxed: bytes) -> bytes:
        """The fragment of a small file `muxed`, with its number and start time set to its place in the whole."""
        parts = bytearray(b"".join(muxed[s:e] for kind, s, e in boxes(muxed) if kind in (b"moof", b"mdat")))
        struct.pack_into(">I", parts, find(parts, b"moof", b"mfhd") + 12, len(self.table.counts) + 1)
        time = find(parts, b"moof", b"traf", b"tfdt")
        layout = ">Q" if parts[time + 8] == 1 else ">I"
        struct.pack_into(layout, parts, time + 12, self.frames_out * self._ticks)
        return bytes(parts)
