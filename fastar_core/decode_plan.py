"""Decides before the first model call when the latents are decoded: between the blocks, or all of them at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import ConfigError, GeometryError, MemoryPlanError

BETWEEN = "between blocks"
AT_END = "at the end"
MODES = ("auto", BETWEEN, AT_END)


@dataclass(frozen=True)
class DecodePlan:
    """mode: "between blocks" or "at the end". reason: one sentence. numbers: bytes by name, and the latent frames."""

    mode: str
    reason: str
    numbers: Mapping[str, int]

    def __str__(self) -> str:
        return f"decode {self.mode}: {self.reason}"


def in_words(count: int) -> str:
    """A byte count as people read it: 512 B, 3.5 MB, 6.04 GB (powers of 1000)."""
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def plan_decode(model_bytes: int, kv_bytes: int, decoder_bytes: int, free_bytes: int, total_latent_frames: int,
                forced: str | None = None) -> DecodePlan:
    """When to decode.

    model_bytes: diffusion weights with the working memory of one call. kv_bytes: everything the caches will hold at
    their largest. decoder_bytes: weights, state and working memory of the decoder for one chunk. free_bytes: what the
    device has for this run once other models are unloaded. forced: None or "auto" decides by memory, else one of the
    two modes. Raises MemoryPlanError when the caches alone do not fit, ConfigError and GeometryError for unusable
    input.
    """
    numbers = {"model_bytes": model_bytes, "kv_bytes": kv_bytes, "decoder_bytes": decoder_bytes,
               "free_bytes": free_bytes, "total_latent_frames": total_latent_frames}
    negative = [name for name, value in numbers.items() if value < 0]
    if negative or total_latent_frames < 1:
        raise GeometryError(f"the decode plan was asked about {numbers}; sizes must not be negative and at least one "
                            "latent frame is needed; choose a longer length")
    if forced not in (None, *MODES):
        raise ConfigError(f"decode is '{forced}', expected one of {', '.join(MODES)}; change decode")
    if kv_bytes > free_bytes:
        raise MemoryPlanError(f"the caches of {total_latent_frames} latent frames need {in_words(kv_bytes)}, the "
                              f"device has {in_words(free_bytes)} for this run; choose a cache window, a smaller "
                              "width and height, a shorter length, or a smaller batch")
    return DecodePlan(*_choose(model_bytes, kv_bytes, decoder_bytes, free_bytes, forced), numbers)


def _choose(model_bytes: int, kv_bytes: int, decoder_bytes: int, free_bytes: int,
            forced: str | None) -> tuple[str, str]:
    total = model_bytes + kv_bytes + decoder_bytes
    need = (f"model {in_words(model_bytes)} + caches {in_words(kv_bytes)} + decoder {in_words(decoder_bytes)} = "
            f"{in_words(total)}")
    have = f"{in_words(free_bytes)} the device has for this run"
    short = total - free_bytes
    if forced == BETWEEN:
        if short <= 0:
            return BETWEEN, f"chosen by you; {need} fit the {have}"
        return BETWEEN, (f"chosen by you, though {need} exceed the {have} by {in_words(short)}: the host will move "
                         "weights in and out at every block, which is slow")
    if forced == AT_END:
        return AT_END, f"chosen by you; {need}, {have}. Nothing is shown or written before the last block is denoised"
    if short <= 0:
        return BETWEEN, f"{need} fit the {have}"
    reason = (f"{need} exceed the {have} by {in_words(short)}, so the decoder runs chunk by chunk once the model is "
              "out of the way")
    if decoder_bytes > free_bytes:
        reason += (f"; even then its {in_words(decoder_bytes)} exceed {in_words(free_bytes)}, so it may have to work "
                   "in tiles, with faint seams")
    return AT_END, reason
