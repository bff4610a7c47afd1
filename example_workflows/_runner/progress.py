"""Turns the server's events into one line: blocks, frames, steps, time left."""

from __future__ import annotations

import time
from typing import Any

from .graph import Prompt, title_of
from .talk import Talk, bar_text, clock

BLOCK_EVENT = "fastar.block"  # sent by our sampler after each finished block


class Progress:
    """What the run is doing now, as seen through websocket events."""

    def __init__(self, prompt: Prompt, talk: Talk, now: float | None = None) -> None:
        self._prompt = prompt
        self._talk = talk
        self._begin = time.monotonic() if now is None else now
        self._node: str | None = None
        self._node_begin = self._begin
        self._value, self._max = 0, 0
        self._block: dict[str, Any] = {}
        self._finished: set[str] = set()
        self._waiting = 0

    def handle(self, kind: str, data: dict[str, Any]) -> None:
        """Take in one event and redraw."""
        if kind == "status":
            self._waiting = int(data.get("status", {}).get("exec_info", {}).get("queue_remaining") or 0)
        elif kind == "execution_cached":
            self._finished.update(str(node) for node in data.get("nodes") or [])
        elif kind == "executing":
            self._next(data.get("node"))
        elif kind == "progress":
            if (node := data.get("node")) is not None and str(node) != self._node:
                self._next(node)
            self._value, self._max = int(data.get("value") or 0), int(data.get("max") or 0)
        elif kind == BLOCK_EVENT:
            self._block = data
        else:
            return
        self.draw(force=kind == BLOCK_EVENT and not self._talk.live and self._is_last())

    def draw(self, force: bool = False) -> None:
        """Show the state; the Talk decides how often that leads to output."""
        self._talk.bar(self.line(time.monotonic()), force=force)

    def line(self, now: float) -> str:
        """The state in words."""
        spent = clock(now - self._begin)
        if self._node is None:
            ahead = f", {self._waiting} in the queue" if self._waiting > 1 else ""
            return f"waiting for the server{ahead} - {spent}"
        title = title_of(self._prompt[self._node]) if self._node in self._prompt else f"node {self._node}"
        share = self._share()
        if share is None:
            return f"{bar_text(len(self._finished) / max(len(self._prompt), 1))} {title} - {spent}"
        parts = [f"{bar_text(share)} {round(share * 100):3d} %"]
        if self._block:
            parts.append(f"block {self._block.get('block')}/{self._block.get('blocks')}")
            parts.append(f"frame {self._block.get('frames')}/{self._block.get('total_frames')}")
        else:
            parts.append(f"{title} {self._value}/{self._max}")
        left = self._left(share, now)
        parts.append(f"{clock(left)} left" if left is not None else spent)
        return " - ".join(parts)

    def _share(self) -> float | None:
        """How much of the current node is done, 0..1."""
        if self._max > 0:
            return min(self._value / self._max, 1.0)
        if self._block.get("blocks"):
            return min(float(self._block["block"]) / float(self._block["blocks"]), 1.0)
        return None

    def _left(self, share: float, now: float) -> float | None:
        if share <= 0.02:
            return None
        return (now - self._node_begin) * (1 - share) / share

    def _is_last(self) -> bool:
        return bool(self._block) and self._block.get("block") == self._block.get("blocks")

    def _next(self, node: Any) -> None:
        if self._node is not None:
            self._finished.add(self._node)
        if node is None:
            return
        self._node, self._node_begin = str(node), time.monotonic()
        self._value, self._max, self._block = 0, 0, {}
