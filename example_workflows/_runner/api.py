"""The server's HTTP interface, without proxies and without libraries."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.parse
from pathlib import Path
from typing import Any

from .errors import Exit, RunnerError

TIMEOUT_S = 60.0


class HttpError(Exception):
    """The server answered with an error status; `body` is its text."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body[:300]}")
        self.status = status
        self.body = body


class Api:
    """One server. Raises RunnerError(SERVER) when it cannot be reached, HttpError when it answers with an error."""

    def __init__(self, address: str) -> None:
        parts = urllib.parse.urlsplit(address if "://" in address else f"http://{address}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise RunnerError(
                Exit.USAGE, f"--host '{address}' is no server address: expected something like http://127.0.0.1:8188"
            )
        self.secure = parts.scheme == "https"
        self.host = parts.hostname
        self.port = port or (443 if self.secure else 80)
        self.base = parts.path.rstrip("/")
        self.address = f"{parts.scheme}://{parts.netloc}{self.base}"

    def get(self, path: str) -> Any:
        """The JSON answer to GET."""
        return json.loads(self._exchange("GET", path, None)[1])

    def post(self, path: str, body: Any) -> Any:
        """The JSON answer to POST of `body` as JSON, None for an empty answer."""
        data = self._exchange("POST", path, json.dumps(body).encode())[1]
        return json.loads(data) if data.strip() else None

    def answers(self) -> bool:
        """True when a ComfyUI answers here."""
        try:
            return "system" in self.get("/system_stats")
        except (RunnerError, HttpError, ValueError, TypeError):
            return False

    def version(self) -> str:
        """The version the server gives itself."""
        return str(self.get("/system_stats")["system"].get("comfyui_version", "unknown"))

    def download(self, query: dict[str, str], target: Path) -> None:
        """Save the file that /view serves for filename, subfolder and type."""
        connection = self._connect()
        try:
            connection.request("GET", f"{self.base}/view?{urllib.parse.urlencode(query)}")
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                raise HttpError(answer.status, answer.read().decode("utf-8", "replace"))
            with target.open("wb") as stream:
                while chunk := answer.read(1 << 20):
                    stream.write(chunk)
        except http.client.HTTPException as reason:
            raise self._lost(reason) from reason
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        if self.secure:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self.host, self.port, timeout=TIMEOUT_S, context=context)
        return http.client.HTTPConnection(self.host, self.port, timeout=TIMEOUT_S)

    def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        connection = self._connect()
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, self.base + path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as reason:
            raise self._lost(reason) from reason
        finally:
            connection.close()
        if answer.status >= http.client.BAD_REQUEST:
            raise HttpError(answer.status, data.decode("utf-8", "replace"))
        return answer.status, data

    def _lost(self, reason: Exception) -> RunnerError:
        return RunnerError(
            Exit.SERVER, f"no answer from {self.address} ({reason}). Check that ComfyUI runs there and the address."
        )
