"""Queues a prompt and follows it to its end over the websocket; the server's history has the last word."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.parse
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .api import Api, HttpError
from .errors import Exit, RunnerError
from .graph import Prompt, describe
from .progress import Progress
from .websocket import ClosedError, WebSocket, WebSocketError

_ASK_EVERY_S = 5.0
_STOP_WAIT_S = 20.0
OWN_ERRORS = ".fastar_core.errors"


@dataclass(frozen=True)
class Done:
    """A finished run: what the history says about its outputs, by node id."""

    prompt_id: str
    outputs: dict[str, dict[str, Any]]
    seconds: float


class Run:
    """One prompt on one server. `alive` tells whether a server of our own still runs; always True for others."""

    def __init__(self, api: Api, prompt: Prompt, progress: Progress, alive: Callable[[], bool] = lambda: True) -> None:
        self._api = api
        self._prompt = prompt
        self._progress = progress
        self._alive = alive
        self._client = uuid.uuid4().hex
        self._socket = self._connect()
        self.prompt_id: str | None = None
        self.warnings: list[str] = []

    def close(self) -> None:
        self._socket.close()

    def submit(self, workflow: dict[str, Any] | None) -> None:
        """Queue it; `workflow` is the UI form that goes into the files. Raises RunnerError(REFUSED)."""
        extra = {"extra_pnginfo": {"workflow": workflow}} if workflow is not None else {}
        body = {"prompt": self._prompt, "client_id": self._client, "extra_data": extra}
        try:
            answer = self._api.post("/prompt", body)
        except HttpError as refusal:
            raise RunnerError(Exit.REFUSED, self._refusal(refusal)) from refusal
        self.prompt_id = str(answer["prompt_id"])
        self.warnings = node_errors(self._prompt, answer.get("node_errors"))

    def follow(self, timeout_s: float | None) -> Done:
        """Wait for the end. Raises RunnerError FAILED, INTERRUPTED, TIMEOUT or LOST."""
        begin = time.monotonic()
        asked = begin
        while True:
            event = self._event()
            now = time.monotonic()
            if event is not None and self._ends(event):
                return self._result(now - begin)
            if now - asked > _ASK_EVERY_S:
                asked = now
                self._progress.draw()
                if (self._history() or {}).get("status"):
                    return self._result(now - begin)
            if timeout_s is not None and now - begin > timeout_s:
                self.interrupt()
                raise RunnerError(Exit.TIMEOUT, f"--timeout {timeout_s:g}: the run took longer and was stopped")

    def interrupt(self) -> None:
        """Take the prompt from the queue or stop it, and wait a little until the server has closed its files."""
        if self.prompt_id is None:
            return
        with contextlib.suppress(RunnerError, HttpError):
            self._api.post("/queue", {"delete": [self.prompt_id]})
            self._api.post("/interrupt", {"prompt_id": self.prompt_id})
            end = time.monotonic() + _STOP_WAIT_S
            while time.monotonic() < end and self._queued() and not self._history():
                time.sleep(0.2)

    def _queued(self) -> bool:
        queue = self._api.get("/queue")
        entries = [*queue.get("queue_running", []), *queue.get("queue_pending", [])]
        return any(entry[1] == self.prompt_id for entry in entries)

    def _event(self) -> tuple[str, dict[str, Any]] | None:
        """The next event about this prompt, after the progress line has seen it."""
        try:
            message = self._socket.receive(0.5)
        except (ClosedError, WebSocketError, OSError) as reason:
            self._reconnect(reason)
            return None
        if not isinstance(message, str):
            return None
        try:
            event = json.loads(message)
            kind, data = str(event["type"]), event.get("data")
        except (ValueError, KeyError, TypeError):
            return None
        if not isinstance(data, dict) or data.get("prompt_id", self.prompt_id) != self.prompt_id:
            return None
        self._progress.handle(kind, data)
        return kind, data

    def _ends(self, event: tuple[str, dict[str, Any]]) -> bool:
        kind, data = event
        if kind == "execution_error":
            raise RunnerError(Exit.FAILED, failure(self._prompt, data))
        if kind == "execution_interrupted":
            raise RunnerError(Exit.INTERRUPTED, "the run was interrupted on the server")
        return kind == "execution_success" or (kind == "executing" and data.get("node") is None)

    def _result(self, seconds: float) -> Done:
        """The history entry; it is written a moment after the last event."""
        end = time.monotonic() + _STOP_WAIT_S
        while (entry := self._history()) is None or not entry.get("status"):
            if time.monotonic() > end or not self._alive():
                raise RunnerError(Exit.LOST, "the run ended, but the server does not tell what came out of it")
            time.sleep(0.1)
        for kind, data in entry["status"].get("messages") or []:
            self._ends((kind, data))
        if entry["status"].get("status_str") == "error":
            raise RunnerError(Exit.FAILED, "the run failed, the server gave no reason; its log may have one")
        return Done(str(self.prompt_id), entry.get("outputs") or {}, seconds)

    def _history(self) -> dict[str, Any] | None:
        try:
            return self._api.get(f"/history/{self.prompt_id}").get(self.prompt_id)
        except (RunnerError, HttpError) as reason:
            if not self._alive():
                raise RunnerError(Exit.LOST, "the server died during the run") from reason
            return None

    def _connect(self) -> WebSocket:
        query = urllib.parse.urlencode({"clientId": self._client})
        try:
            return WebSocket(self._api.host, self._api.port, f"{self._api.base}/ws?{query}", self._api.secure)
        except (OSError, WebSocketError) as reason:
            raise RunnerError(Exit.SERVER, f"no websocket to {self._api.address}: {reason}") from reason

    def _reconnect(self, reason: Exception) -> None:
        """A server that runs on may be reached again; what was missed is in the history."""
        self._socket.close()
        for _ in range(5):
            if not self._alive():
                break
            time.sleep(1.0)
            with contextlib.suppress(RunnerError):
                self._socket = self._connect()
                return
        raise RunnerError(Exit.LOST, f"the connection to the server was lost during the run: {reason}")

    def _refusal(self, refusal: HttpError) -> str:
        try:
            answer = json.loads(refusal.body)
            error = answer["error"]
            words = (error,) if isinstance(error, str) else (error["message"], error.get("details"))
            head = " - ".join(filter(None, words))
            lines = node_errors(self._prompt, answer.get("node_errors"))
        except (ValueError, KeyError, TypeError):
            return f"the server refused the workflow: {refusal}"
        return "\n".join([f"the server refused the workflow: {head.strip()}", *lines])


def node_errors(prompt: Prompt, errors: Any) -> list[str]:
    """One line for each fault that the server found in a node."""
    lines = []
    for node_id, found in (errors or {}).items() if isinstance(errors, dict) else ():
        for error in found.get("errors") or []:
            text = ": ".join(filter(None, (error.get("message"), error.get("details"))))
            lines.append(f"  {describe(prompt, str(node_id), found.get('class_type'))}: {text}")
    return lines


def failure(prompt: Prompt, data: dict[str, Any]) -> str:
    """A node's error in words: which node, and what it said; never the traceback."""
    where = describe(prompt, str(data.get("node_id")), data.get("node_type"))
    text = str(data.get("exception_message") or data.get("exception_type") or "no message").strip()
    module, _, kind = str(data.get("exception_type") or "").rpartition(".")
    enough = not kind or text == kind or module.endswith(OWN_ERRORS)  # our own messages say it all
    return f"{where} failed: {text}" + ("" if enough else f" ({kind})")
