"""What is known about a VAE before a run: whether it streams exactly, and how many bytes it will need."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from comfy import model_management

from .decode import StreamDecoder, vae_kind

logger = logging.getLogger(__name__)

PROBE_LATENTS, PROBE_ROWS, PROBE_COLUMNS = 4, 2, 4
# The same sums in another order differ by rounding alone: nothing to see on a CPU in fp32, TF32 products and 16-bit
# activations on a GPU. A wrong carry-over is off by 0.1 and more.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
TOLERANCE_TF32 = 5e-3


@dataclass(frozen=True)
class VaeProbe:
    """kind: how the run will decode. least: see StreamDecoder. error: largest pixel difference found (0..1 scale).

    state_bytes: of one latent pixel and batch row, kept between blocks. line: what happened, for the report.
    """

    kind: str
    least: int
    error: float
    state_bytes: float
    line: str


def tolerance(vae: Any) -> float:
    """Largest pixel difference (0..1 scale) that counts as equal for this VAE's dtype and device."""
    if vae.vae_dtype == torch.float32 and torch.device(vae.device).type != "cpu":
        return TOLERANCE_TF32
    return TOLERANCE.get(vae.vae_dtype, max(TOLERANCE.values()))


@torch.inference_mode()
def probe(vae: Any, block: int) -> VaeProbe:
    """Decode four tiny random latents both ways, pushed in blocks of `block`; fall back to the stock decode if they
    differ.

    Costs a fraction of a second. Run it once per run, before the sampling model is loaded.
    """
    kind = vae_kind(vae)
    if kind == "whole":
        name = type(vae.first_stage_model).__name__
        return VaeProbe(kind, 1, 0.0, 0.0, f"the VAE ({name}) is not known to decode block by block: everything is "
                                           "decoded at the end by the stock decode, and all frames lie in memory then")
    noise = torch.randn(1, vae.latent_channels, PROBE_LATENTS, PROBE_ROWS, PROBE_COLUMNS,
                        generator=torch.Generator().manual_seed(0))
    wanted = vae.decode(noise).float().cpu()
    worst = 0.0
    # one latent per call is exact on some hosts only, but lets no latent wait
    for least in (1, 2) if kind == "wan" else (1,):
        error, state = _difference(vae, kind, least, block, noise, wanted)
        if error <= tolerance(vae):
            chunks = StreamDecoder(vae, kind, least).chunks
            line = f"the VAE decodes {chunks}; checked on {PROBE_LATENTS} latents, off by {error:.1e}"
            return VaeProbe(kind, least, error, state / (PROBE_ROWS * PROBE_COLUMNS), line)
        worst = max(worst, error)
    line = (f"decoding block by block differs from the stock decode by {worst:.1e} (allowed {tolerance(vae):.0e}) "
            "with this VAE and host: everything is decoded at the end by the stock decode, and all frames lie in "
            "memory then")
    logger.warning("FAST-AR: %s", line)
    return VaeProbe("whole", 1, worst, 0.0, line)


def _difference(vae: Any, kind: str, least: int, block: int, noise: torch.Tensor,
                wanted: torch.Tensor) -> tuple[float, int]:
    """(largest difference to `wanted`, bytes of state between blocks) when `noise` is pushed block by block."""
    decoder = StreamDecoder(vae, kind, least)
    parts, state = [], 0
    for part in torch.split(noise, block, 2):
        parts.append(decoder.push(part))
        state = max(state, decoder.state_bytes())
    parts.append(decoder.flush())
    frames = torch.cat(parts, 1)
    if frames.shape != wanted.shape:
        return float("inf"), state
    return float((frames - wanted).abs().max()), state


def choose_decoder(vae: Any, found: VaeProbe) -> StreamDecoder:
    """The decoder of a run, as the probe found it to be exact."""
    return StreamDecoder(vae, found.kind, found.least)


def decoder_bytes(vae: Any, found: VaeProbe, batch: int, block: int, rows: int, columns: int) -> int:
    """Bytes the VAE needs on its device to decode one block between others: weights, working memory, carried state.

    block: latent frames; rows, columns: latent pixels. The working memory is the host's own estimate; rows of a batch
    are decoded one after the other.
    """
    at_once = block + found.least - 1 if found.kind == "wan" else block
    working = vae.memory_used_decode((1, vae.latent_channels, at_once, rows, columns), vae.vae_dtype)
    state = found.state_bytes * rows * columns * batch
    return int(model_management.module_size(vae.first_stage_model) + working + state)
