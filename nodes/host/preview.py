"""Progress of a streaming run: a bar over all model calls, a picture of the newest frame, an event per finished block."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import comfy.utils
import latent_preview
import torch
from comfy.model_management import InterruptProcessingException

from ...fastar_core.geometry import PIXELS_PER_LATENT, Block, pixel_frames_for
from ...fastar_core.report_text import time_in_words

EVENT = "fastar.block"
RECENT_BLOCKS = 8
logger = logging.getLogger(__name__)


def make_previewer(device: torch.device, latent_format: Any) -> Any:
    """The previewer the user chose in the host, or None; one that cannot be made costs the pictures, not the run."""
    try:
        return latent_preview.get_previewer(device, latent_format)
    except Exception as reason:  # previewers are replaced by other packs and may raise anything
        logger.warning("FAST-AR: no preview pictures: %s: %s", type(reason).__name__, reason)
        return None


def _server() -> Any:
    """The running server, or None in a process without one."""
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)


def send_event(data: dict[str, Any]) -> None:
    """Sends EVENT to the client that queued the prompt; without a running server nothing happens."""
    server = _server()
    if server is not None:
        server.send_sync(EVENT, data, getattr(server, "client_id", None))


def show_text(node_id: str | None, text: str) -> None:
    """Shows ``text`` in the node while it runs; the web interface keeps the last one there."""
    server = _server()
    if server is not None and node_id is not None:
        server.send_progress_text(text, node_id, getattr(server, "client_id", None))


class StreamProgress:
    """Counts model calls (all denoise steps, prefill and clean passes) and estimates the rest of the run."""

    def __init__(self, node_id: str | None, previewer: Any, length: int) -> None:
        """``length``: pixel frames that will be delivered per row of the batch."""
        self.node_id = node_id
        self.previewer = previewer
        self.length = length
        self.total = 1
        self.done = 0
        self._begun = 0
        self._blocks: list[Block] = []
        self._ends: list[float] = []
        self._bar: Any = None

    def start(self, blocks: list[Block], total_calls: int) -> None:
        """Before the first model call."""
        self.total = total_calls
        self._blocks = blocks
        self._ends = [time.monotonic()]
        self._bar = comfy.utils.ProgressBar(self.total, node_id=self.node_id)
        self._bar.update_absolute(0, self.total)

    def call(self) -> None:
        """Before every model call: those before it are done (clean and prefill passes report nothing by themselves)."""
        if self._begun > self.done:
            self.done = self._begun
            self._bar.update_absolute(self.done, self.total)
        self._begun += 1

    def step(self, latents: torch.Tensor) -> None:
        """After a denoise step; ``latents`` [B, C, n, h, w] is the prediction of the block in model space."""
        self.done = self._begun
        self._bar.update_absolute(self.done, self.total, self._picture(latents))

    def block(self, block: Block) -> None:
        """After a block is finished and, when decoding goes along, decoded."""
        self._ends.append(time.monotonic())
        frames = min(self.length, pixel_frames_for(block.start + block.num_frames))
        left = self.eta(block.index + 1)
        send_event({"node": self.node_id, "block": block.index + 1, "blocks": len(self._blocks), "frames": frames,
                    "total_frames": self.length, "eta_seconds": round(left, 1)})
        show_text(self.node_id, f"block {block.index + 1} of {len(self._blocks)}, frame {frames} of {self.length}, "
                                f"{time_in_words(left)} left")

    def eta(self, finished: int) -> float:
        """Seconds that the remaining blocks will take, from the last few (the very first also warms things up)."""
        skip = 1 if finished > 1 else 0
        first = max(skip, finished - RECENT_BLOCKS)
        spent = self._ends[finished] - self._ends[first]
        latents = sum(b.num_frames for b in self._blocks[first:finished])
        return spent / max(1, latents) * sum(b.num_frames for b in self._blocks[finished:])

    def finish(self) -> None:
        """After the last call."""
        if self._bar is not None:
            self.done = self.total
            self._bar.update_absolute(self.total, self.total)

    def _picture(self, latents: torch.Tensor) -> Any:
        """Preview of the newest latent frame, no larger than the video itself."""
        if self.previewer is None:
            return None
        try:
            kind, image, limit = self.previewer.decode_latent_to_preview_image("JPEG", latents[:1, :, -1:])
            size = max(image.size[0], latents.shape[-1] * PIXELS_PER_LATENT, latents.shape[-2] * PIXELS_PER_LATENT)
            return kind, image, min(size, limit) if limit else size
        except InterruptProcessingException:
            raise
        except Exception as reason:  # a previewer of another pack must not end a long run
            logger.warning("FAST-AR: preview pictures stopped: %s: %s", type(reason).__name__, reason)
            self.previewer = None
            return None
