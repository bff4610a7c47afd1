"""A small websocket client (RFC 6455): handshake, masked frames out, fragments, ping, pong and close in."""

from __future__ import annotations

import base64
import contextlib
import enum
import hashlib
import os
import socket
import ssl
import struct
import time

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_MAX_HEADER = 65536
MAX_MESSAGE = 256 * 2**20
CONTROL_LIMIT = 125


class Opcode(enum.IntEnum):
    """Frame types."""

    CONTINUATION = 0
    TEXT = 1
    BINARY = 2
    CLOSE = 8
    PING = 9
    PONG = 10


class ClosedError(Exception):
    """The connection ended; says how."""


class WebSocketError(Exception):
    """The other side does not keep the protocol."""


def encode_frame(opcode: int, payload: bytes, mask: bytes) -> bytes:
    """One final frame as a client must send it: masked with the 4 bytes `mask`."""
    size = len(payload)
    if size <= CONTROL_LIMIT:
        head = struct.pack("!BB", 0x80 | opcode, 0x80 | size)
    elif size < 65536:
        head = struct.pack("!BBH", 0x80 | opcode, 0x80 | 126, size)
    else:
        head = struct.pack("!BBQ", 0x80 | opcode, 0x80 | 127, size)
    return head + mask + apply_mask(payload, mask)


def apply_mask(payload: bytes, mask: bytes) -> bytes:
    """XOR with the repeated mask; its own inverse."""
    size = len(payload)
    repeated = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big")


def decode_frame(data: bytes) -> tuple[bool, int, bytes, int] | None:
    """(final, opcode, payload, bytes used) of the first frame in `data`, None while it is incomplete."""
    if len(data) < 2:
        return None
    first, second = data[0], data[1]
    if first & 0x70:
        raise WebSocketError(f"reserved bits are set in a frame (first byte {first:#04x})")
    size, at = second & 0x7F, 2
    if size >= 126:
        width = 2 if size == 126 else 8
        if len(data) < at + width:
            return None
        size, at = int.from_bytes(data[at : at + width], "big"), at + width
    if size > MAX_MESSAGE:
        raise WebSocketError(f"a frame of {size} bytes, the limit is {MAX_MESSAGE}")
    mask = b""
    if second & 0x80:
        mask, at = data[at : at + 4], at + 4
    if len(data) < at + size:
        return None
    payload = data[at : at + size]
    return bool(first & 0x80), first & 0x0F, apply_mask(payload, mask) if mask else payload, at + size


class WebSocket:
    """A connection to ws://host:port/path (wss with `secure`). receive() gives whole messages."""

    def __init__(self, host: str, port: int, path: str, secure: bool = False, timeout_s: float = 30.0) -> None:
        self._buffer = bytearray()
        self._parts: list[bytes] = []
        self._kind = Opcode.TEXT
        connection = socket.create_connection((host, port), timeout_s)
        try:
            if secure:
                connection = ssl.create_default_context().wrap_socket(connection, server_hostname=host)
            self._socket = connection
            self._shake_hands(host, port, path)
        except BaseException:
            connection.close()
            raise

    def send_text(self, text: str) -> None:
        """Send one text message."""
        self._send(Opcode.TEXT, text.encode())

    def receive(self, timeout_s: float) -> str | bytes | None:
        """The next message (str for text, bytes for binary), None when none is complete within the time.

        Pings are answered. Raises ClosedError when the connection ended, WebSocketError when the protocol is broken.
        """
        end = time.monotonic() + timeout_s
        while True:
            message = self._buffered()
            if message is not None:
                return message
            left = end - time.monotonic()
            if left <= 0:
                return None
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(1 << 18)
            except (TimeoutError, ssl.SSLWantReadError):
                return None
            except OSError as reason:
                raise ClosedError(f"the connection broke: {reason}") from reason
            if not data:
                raise ClosedError("the server closed the connection without a word")
            self._buffer += data

    def close(self) -> None:
        """Say goodbye if that is still possible, and close."""
        with contextlib.suppress(OSError):
            self._send(Opcode.CLOSE, struct.pack("!H", 1000))
        with contextlib.suppress(OSError):
            self._socket.close()

    def _send(self, opcode: Opcode, payload: bytes) -> None:
        self._socket.settimeout(30.0)
        self._socket.sendall(encode_frame(opcode, payload, os.urandom(4)))

    def _shake_hands(self, host: str, port: int, path: str) -> None:
        key = base64.b64encode(os.urandom(16))
        name = f"[{host}]" if ":" in host else host
        request = (
            f"GET {path} HTTP/1.1\r\nHost: {name}:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key.decode()}\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        self._socket.sendall(request.encode())
        while b"\r\n\r\n" not in self._buffer:
            data = self._socket.recv(4096)
            if not data or len(self._buffer) > _MAX_HEADER:
                raise WebSocketError("the server did not answer the websocket request")
            self._buffer += data
        head, _, rest = bytes(self._buffer).partition(b"\r\n\r\n")
        self._buffer = bytearray(rest)
        lines = head.split(b"\r\n")
        if lines[0].split(b" ")[1:2] != [b"101"]:
            raise WebSocketError(f"the server refused the websocket: {lines[0].decode('latin-1')}")
        pairs = (line.partition(b":") for line in lines[1:])
        fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
        wanted = base64.b64encode(hashlib.sha1(key + _GUID).digest())
        if fields.get(b"sec-websocket-accept") != wanted:
            raise WebSocketError("the answer to the websocket request does not belong to it")

    def _buffered(self) -> str | bytes | None:
        """The next complete message in the buffer; answers control frames on the way."""
        while frame := decode_frame(bytes(self._buffer)):
            final, opcode, payload, used = frame
            del self._buffer[:used]
            if opcode == Opcode.PING:
                self._send(Opcode.PONG, payload)
            elif opcode == Opcode.CLOSE:
                code = struct.unpack("!H", payload[:2])[0] if len(payload) >= 2 else 1005
                with contextlib.suppress(OSError):
                    self._send(Opcode.CLOSE, payload[:2])
                raise ClosedError(
                    f"the server closed the connection (code {code} {payload[2:].decode('utf-8', 'replace')})"
                )
            elif opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONTINUATION):
                if message := self._collect(final, opcode, payload):
                    return message[0]
            elif opcode != Opcode.PONG:
                raise WebSocketError(f"unknown frame type {opcode}")
        return None

    def _collect(self, final: bool, opcode: int, payload: bytes) -> tuple[str | bytes] | None:
        if (opcode == Opcode.CONTINUATION) != bool(self._parts):
            raise WebSocketError("a fragment out of order")
        if opcode != Opcode.CONTINUATION:
            self._kind = Opcode(opcode)
        self._parts.append(payload)
        if sum(len(part) for part in self._parts) > MAX_MESSAGE:
            raise WebSocketError(f"a message of more than {MAX_MESSAGE} bytes")
        if not final:
            return None
        whole, self._parts = b"".join(self._parts), []
        return (whole.decode("utf-8", "replace") if self._kind == Opcode.TEXT else whole,)
