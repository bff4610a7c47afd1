"""The websocket client: frames bit by bit, and against a real server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
from _runner import websocket
from _runner.websocket import ClosedError, Opcode, WebSocket, WebSocketError, decode_frame, encode_frame

pytestmark = pytest.mark.cpu

MASK = b"\x37\xfa\x21\x3d"


def server_frame(opcode: int, payload: bytes, final: bool = True) -> bytes:
    """A frame as a server sends it: not masked."""
    size = len(payload)
    head = bytes([(0x80 if final else 0) | opcode])
    if size < 126:
        return head + bytes([size]) + payload
    if size < 65536:
        return head + b"\x7e" + size.to_bytes(2, "big") + payload
    return head + b"\x7f" + size.to_bytes(8, "big") + payload


def test_the_masked_example_of_the_standard() -> None:
    assert encode_frame(Opcode.TEXT, b"Hello", MASK) == bytes.fromhex("818537fa213d7f9f4d5158")


@pytest.mark.parametrize("size", [0, 1, 3, 125, 126, 127, 65535, 65536, 70001])
def test_frames_of_all_lengths_come_back(size: int) -> None:
    payload = bytes(number % 251 for number in range(size))
    for frame in (encode_frame(Opcode.BINARY, payload, MASK), server_frame(Opcode.BINARY, payload)):
        assert decode_frame(frame + b"next") == (True, Opcode.BINARY, payload, len(frame))
        assert decode_frame(frame[:-1]) is None


def test_a_frame_is_masked() -> None:
    assert b"secret text" not in encode_frame(Opcode.TEXT, b"secret text", MASK)
    assert encode_frame(Opcode.TEXT, b"x", MASK)[1] & 0x80


def test_what_breaks_the_protocol_is_refused() -> None:
    with pytest.raises(WebSocketError, match="reserved"):
        decode_frame(b"\xc1\x00")
    with pytest.raises(WebSocketError, match="limit"):
        decode_frame(b"\x82\x7f" + (2**40).to_bytes(8, "big"))


class Wire(WebSocket):
    """The receiving side alone, fed with bytes; keeps what is sent back."""

    def __init__(self, data: bytes) -> None:
        self._buffer, self._parts, self._kind = bytearray(data), [], Opcode.TEXT
        self.sent: list[tuple[int, bytes]] = []

    def _send(self, opcode: Opcode, payload: bytes) -> None:
        self.sent.append((opcode, payload))


def test_a_ping_between_fragments_is_answered() -> None:
    parts = [server_frame(1, "\u00e4b".encode()[:1], final=False), server_frame(9, b"are you there")]
    wire = Wire(b"".join([*parts, server_frame(0, "\u00e4b".encode()[1:])]))
    assert wire._buffered() == "\u00e4b"
    assert wire.sent == [(Opcode.PONG, b"are you there")]


def test_fragments_out_of_order_are_refused() -> None:
    with pytest.raises(WebSocketError, match="order"):
        Wire(server_frame(0, b"x"))._buffered()
    with pytest.raises(WebSocketError, match="order"):
        Wire(server_frame(1, b"x", final=False) + server_frame(1, b"y"))._buffered()
    with pytest.raises(WebSocketError, match="frame type"):
        Wire(server_frame(3, b"x"))._buffered()


def test_a_close_is_answered_and_told() -> None:
    wire = Wire(server_frame(8, (1001).to_bytes(2, "big") + b"going"))
    with pytest.raises(ClosedError, match="1001 going"):
        wire._buffered()
    assert wire.sent == [(Opcode.CLOSE, (1001).to_bytes(2, "big"))]


async def serve_echo(port: list[int], ready: threading.Event) -> None:
    """A websocket server made with the library ComfyUI uses: echoes, and obeys a few words."""
    from aiohttp import web

    async def handle(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=0)
        await socket.prepare(request)
        async for message in socket:
            if message.data == "ping me":
                await socket.ping(b"hello")
                await socket.send_str("pinged")
            elif message.data == "binary":
                await socket.send_bytes(b"\x00\x01" * 100_000)
            elif message.data == "close":
                await socket.close(code=1000, message=b"bye")
            else:
                await socket.send_str(message.data)
        return socket

    async def plain(request: web.Request) -> web.Response:
        return web.Response(text="no websocket here")

    app = web.Application()
    app.add_routes([web.get("/ws", handle), web.get("/plain", plain)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port.append(runner.addresses[0][1])
    ready.set()


@pytest.fixture(scope="module")
def echo() -> Iterator[int]:
    """The port of serve_echo, which runs in a thread."""
    pytest.importorskip("aiohttp")
    loop, ready, port = asyncio.new_event_loop(), threading.Event(), []

    def serve() -> None:
        loop.run_until_complete(serve_echo(port, ready))
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(10)
    yield port[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)


def test_talks_with_a_real_server(echo: int) -> None:
    socket = WebSocket("127.0.0.1", echo, "/ws?clientId=x")
    for text in ("short", "long " * 1000, "very long " * 10_000, "\u00fc\u20ac"):
        socket.send_text(text)
        assert socket.receive(10) == text
    socket.send_text("ping me")
    assert socket.receive(10) == "pinged"
    socket.send_text("binary")
    assert socket.receive(10) == b"\x00\x01" * 100_000
    assert socket.receive(0.05) is None
    socket.send_text("close")
    with pytest.raises(ClosedError, match="1000 bye"):
        socket.receive(10)
    socket.close()


def test_a_refused_handshake_is_told(echo: int) -> None:
    with pytest.raises(WebSocketError, match="200"):
        WebSocket("127.0.0.1", echo, "/plain")


def test_a_wrong_answer_to_the_handshake_is_refused(echo: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "_GUID", b"another")
    with pytest.raises(WebSocketError, match="belong"):
        WebSocket("127.0.0.1", echo, "/ws")
