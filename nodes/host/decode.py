"""Decodes latents block by block to exactly the frames that decoding all of them at once gives.

Three kinds of VAE:
  wan     the host's Wan 2.1 VAE. Each causal convolution needs the last two frames it saw; one list of such states
  per batch
          row is kept here, never in the user's VAE. The first call takes one latent (it becomes one frame, later ones
          four). Later calls take at least two where the host's class keeps only what the last call brought (0.27),
          any number where it completes the state itself (0.3.75); a shorter rest waits for the next block.
  frames  a VAE whose latent frames do not depend on each other (first stage marked `frames_independent`).
  whole   anything else: latents are collected and decoded by the stock decode at the end.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import comfy.ldm.wan.vae as wan
import torch
from comfy import model_management
from torch import Tensor

from ...fastar_core.errors import FastARError, GeometryError, UnsupportedError
from ...fastar_core.geometry import PIXEL_FRAMES_PER_LATENT, pixel_frames_for
from .memory_swap import use_vae

logger = logging.getLogger(__name__)

LATENT_CHANNELS = 16
TILE, TILE_OVERLAP, TILE_CONTEXT = 32, 8, 6  # latent pixels, latent pixels, latent frames before the block
IN_WORDS = {
    "wan": "block by block with carried state (first one latent, then at least {least})",
    "frames": "block by block (the latent frames of this VAE are independent)",
    "whole": "all at once at the end (this VAE cannot be decoded block by block)",
}


def vae_kind(vae: Any) -> str:
    """ "wan", "frames" or "whole"; see the module text."""
    if isinstance(vae.first_stage_model, wan.WanVAE):
        return "wan"
    return "frames" if getattr(vae.first_stage_model, "frames_independent", False) else "whole"


def check_vae(vae: Any, channels: int = LATENT_CHANNELS) -> None:
    """Refuse a VAE that cannot belong to the model before anything is computed. channels: of the model's latent.

    Raises UnsupportedError.
    """
    if vae is None or vae.first_stage_model is None:
        raise UnsupportedError("the VAE input holds no VAE (the checkpoint has none); connect Load VAE with the Wan "
                               "2.1 VAE")
    kind = {1: "audio or 1-D", 2: "image", 3: "video"}.get(vae.latent_dim, f"{vae.latent_dim}-D")
    if vae.latent_dim != 3 or vae.latent_channels != channels:
        raise UnsupportedError(f"this VAE decodes {vae.latent_channels}-channel {kind} latents, the model makes "
                               f"{channels}-channel video latents; connect the VAE that belongs to the model (Wan "
                               "2.1 VAE)")


class _Decoder(Protocol):
    def push(self, latents: Tensor) -> Tensor | None: ...
    def flush(self) -> Tensor | None: ...
    def state_bytes(self) -> int: ...


def _device_context(vae: Any) -> contextlib.AbstractContextManager[Any]:
    """Newer hosts select the VAE's device while it computes."""
    select = getattr(model_management, "cuda_device_context", None)
    return select(vae.device) if select else contextlib.nullcontext()


def _is_oom(reason: Exception) -> bool:
    judge = getattr(model_management, "is_oom", None)
    return judge(reason) if judge else isinstance(reason, model_management.OOM_EXCEPTION)


def call_sizes(count: int, started: bool, least: int, last: bool) -> list[int]:
    """Latents of each decoder call for `count` latents at hand; what the sizes leave over waits for the next block.

    The first call ever takes one latent. least: the fewest that a later call may take (the very last call excepted).
    """
    sizes = [] if started or not count else [1]
    left = count - len(sizes)
    step = max(least, 1)
    while left >= 2 * step:
        sizes.append(step)
        left -= step
    if left >= step or (last and left):
        sizes.append(left)
    return sizes


class _WanStream:
    """The Wan VAE: one list of convolution states per batch row."""

    def __init__(self, vae: Any, least: int) -> None:
        self.vae, self.least = vae, least
        self.state: list[list[Any]] = []
        self.waiting: Tensor | None = None
        self.recent: Tensor | None = None  # the last decoded latents, for the emergency of _in_tiles
        self.tiled = False

    def push(self, latents: Tensor, last: bool = False) -> Tensor | None:
        latents = latents if self.waiting is None else torch.cat((self.waiting, latents), 2)
        started = self.recent is not None
        sizes = call_sizes(latents.shape[2], started, self.least, last)
        done = latents[:, :, :sum(sizes)]
        frames = self._decode(done, sizes) if sizes and not self.tiled else None
        if sizes and self.tiled:
            frames = self._in_tiles(done)
        if sizes:
            known = done if self.recent is None else torch.cat((self.recent, done), 2)
            self.recent = known[:, :, -TILE_CONTEXT:].clone()
        self.waiting = latents[:, :, sum(sizes):].clone() if latents.shape[2] > sum(sizes) else None
        return frames

    def flush(self) -> Tensor | None:
        return None if self.waiting is None else self.push(self.waiting[:, :, :0], last=True)

    def _decode(self, latents: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """latents [B, C, n, h, w] cut into calls of `sizes`; None when memory ran out (the stream is tiled from then
        on).
        """
        shape = (1, latents.shape[1], max(sizes), *latents.shape[3:])
        use_vae(self.vae, int(self.vae.memory_used_decode(shape, self.vae.vae_dtype)))
        self.state = self.state or [self._fresh() for _ in latents]
        try:
            with _device_context(self.vae):
                rows = [self._row(index, torch.split(row[None], list(sizes), 2)) for index, row in enumerate(latents)]
            return torch.cat(rows) if len(rows) > 1 else rows[0]
        except Exception as reason:
            if not _is_oom(reason):
                raise
        logger.warning("FAST-AR: the VAE ran out of memory; the video from here on is decoded in tiles, with faint "
                       "seams. A smaller width and height, or decode 'at the end', avoids that")
        self.tiled, self.state = True, []
        model_management.free_memory(1e30, self.vae.device)
        model_management.soft_empty_cache()
        return None

    def _fresh(self) -> list[Any]:
        modules = self.vae.first_stage_model.decoder.modules()
        return [None] * sum(isinstance(module, wan.CausalConv3d) for module in modules)

    def _row(self, index: int, calls: Sequence[Tensor]) -> Tensor:
        """All calls of one batch row -> frames [1, F, H, W, channels] in 0..1 on the CPU."""
        model, frames = self.vae.first_stage_model, []
        for latents in calls:
            x = model.conv2(latents.to(self.vae.vae_dtype).to(self.vae.device))
            out = model.decoder(x, feat_cache=self.state[index], feat_idx=[0])
            out = torch.cat(out, 2) if isinstance(out, list) else out
            frames.append(self.vae.process_output(out.float().cpu()))
            # newer hosts keep slices of whole activations as state; between blocks that memory belongs to the model
            self.state[index] = [_compact(slot) for slot in self.state[index]]
        return torch.cat(frames, 2).movedim(1, -1)

    def _in_tiles(self, latents: Tensor) -> Tensor:
        """The stock tiled decode of the latents, with the latents before them as a run-up that is cut off again."""
        count = PIXEL_FRAMES_PER_LATENT * latents.shape[2]
        if self.recent is None:
            count = pixel_frames_for(latents.shape[2])
        else:
            latents = torch.cat((self.recent, latents), 2)
        frames = self.vae.decode_tiled(latents, tile_x=TILE, tile_y=TILE, overlap=TILE_OVERLAP)
        return frames[:, -count:].float().cpu()

    def state_bytes(self) -> int:
        return sum(s.untyped_storage().nbytes() for row in self.state for s in row if isinstance(s, Tensor))


def _compact(slot: Any) -> Any:
    """A convolution state without the rest of the activation that it may be a slice of."""
    return slot.clone() if isinstance(slot, Tensor) and slot.untyped_storage().nbytes() > slot.nbytes else slot


class _FrameStream:
    """Independent latent frames: the stock decode of each block, behind one latent that takes the role of the first."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self.lead: int | None = None  # pixel frames of the first latent

    def push(self, latents: Tensor) -> Tensor | None:
        if self.lead is None:
            frames = self.vae.decode(latents)
            self.lead = self.vae.decode(latents[:1, :, :1]).shape[1]
            return frames
        return self.vae.decode(torch.cat((latents[:, :, :1], latents), 2))[:, self.lead:]

    def flush(self) -> Tensor | None:
        return None

    def state_bytes(self) -> int:
        return 0


class _WholeClip:
    """No streaming: the stock decode of everything, which falls back to tiles by itself."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self.collected: list[Tensor] = []

    def push(self, latents: Tensor) -> Tensor | None:
        self.collected.append(latents.cpu())
        return None

    def flush(self) -> Tensor | None:
        if not self.collected:
            return None
        latents, self.collected = torch.cat(self.collected, 2), []
        return self.vae.decode(latents)

    def state_bytes(self) -> int:
        return 0


def _make(vae: Any, kind: str, least: int) -> _Decoder:
    if kind == "wan":
        return _WanStream(vae, least)
    return _FrameStream(vae) if kind == "frames" else _WholeClip(vae)


class StreamDecoder:
    """Frames of a growing latent video, equal to vae.decode of all of it.

    kind: "wan", "frames" or "whole", by default what the VAE is; `choose_decoder` in vae_probe.py checks it first.
    least: fewest latents per later decoder call of a Wan VAE. After every push() and flush() the host may have
    unloaded the model that is sampling: call memory_swap.after_vae. The user's VAE object is never changed.
    """

    def __init__(self, vae: Any, kind: str | None = None, least: int = 2) -> None:
        self.kind = kind or vae_kind(vae)
        self.chunks = IN_WORDS[self.kind].format(least=least)
        self.frames_out = 0
        self.latents_in = 0
        self._vae = vae
        self._shape: tuple[int, ...] | None = None
        self._size = 0, 0, 0
        self._decoder: _Decoder | None = _make(vae, self.kind, least)

    @torch.inference_mode()
    def push(self, latents: Tensor) -> Tensor:
        """latents [B, C, n, h, w] in VAE space, n >= 1 -> the frames that are ready, [B, F, H, W, 3] in 0..1 on the
        CPU.

        F may be 0 while latents wait. Raises GeometryError when the shape does not go on where the last push ended.
        """
        shape = (*latents.shape[:2], *latents.shape[3:])
        if latents.ndim != 5 or not latents.shape[2] or (self._shape or shape) != shape:
            raise GeometryError(f"latents of shape {tuple(latents.shape)} cannot be decoded next; expected "
                                f"[batch, channels, frames, rows, columns] = {self._expected()}")
        self._shape = shape
        scale = self._vae.spacial_compression_decode()
        self._size = latents.shape[3] * scale, latents.shape[4] * scale, getattr(self._vae, "output_channels", 3)
        self.latents_in += latents.shape[2]
        return self._give(lambda decoder: decoder.push(latents.detach()))

    @torch.inference_mode()
    def flush(self) -> Tensor:
        """The frames of everything that still waited, [B, F, H, W, 3]; call it once after the last push."""
        frames = self._give(lambda decoder: decoder.flush())
        self.close()
        return frames

    def close(self) -> None:
        """Drop all state; safe to call at any time, as often as wanted."""
        self._decoder = None

    def state_bytes(self) -> int:
        """Bytes that stay on the VAE's device between blocks."""
        return self._decoder.state_bytes() if self._decoder else 0

    def _expected(self) -> str:
        if self._shape is None:
            return "five sizes with at least one frame"
        batch, channels, *size = self._shape
        return f"[{batch}, {channels}, at least 1, {', '.join(map(str, size))}]"

    def _give(self, work: Callable[[_Decoder], Tensor | None]) -> Tensor:
        if self._decoder is None:
            raise FastARError("this decoder is closed (it was flushed, or failed before); start a new run")
        try:
            frames = work(self._decoder)
        except BaseException:
            self.close()  # half a block is decoded: the state fits no latent any more, and its memory is wanted back
            raise
        if frames is None:
            batch = self._shape[0] if self._shape else 1
            return torch.zeros(batch, 0, *self._size)
        self.frames_out += frames.shape[1]
        return frames.float().cpu()
