"""A rollout of a Wan with random weights through the engine: frames per second and bytes along the run, per cache policy."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from fastar_pack.fastar_core.annca import AnnCASettings
from fastar_pack.fastar_core.annca.pruner import PromptCall
from fastar_pack.fastar_core.annsa import AnnSASettings
from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.geometry import RunGeometry
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.positions import RopeSpec
from fastar_pack.fastar_core.runstate import RunState
from fastar_pack.fastar_core.tempcache.plan import PRESETS
from gpu.correct import Say
from tiny.wan_plain import wan_forward

SIGMAS = (1.0, 0.9375, 5 / 6, 0.625)
PIXEL_FRAMES = 4  # per latent frame
TEXT_ROWS, TEXT_DIM = 512, 4096
Row = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """Sizes of the model and of the video; the defaults are Wan 1.3B at 480 x 832."""

    dim: int = 1536
    ffn: int = 8960
    heads: int = 12
    layers: int = 30
    rows: int = 30
    cols: int = 52
    block: int = 3
    frames: int = 120

    @property
    def cache_bytes(self) -> int:
        """Keys and values of all latent frames in two bytes each."""
        return self.frames * self.rows * self.cols * self.dim * self.layers * 4


SMALL = Model(dim=128, ffn=256, heads=2, layers=2, rows=4, cols=6, frames=15)


@dataclass(frozen=True)
class Choice:
    """A cache policy; torch's attention instead of ours where keys carry no bias; pruned prompt and sparse attention."""

    policy: PolicySettings
    torch_attention: bool = False
    pruned_and_sparse: bool = False


def policies(model: Model) -> dict[str, Choice]:
    """What is rolled out, by name."""
    window = min(21, model.frames // 2)
    tempcache = PolicySettings(kind="tempcache", sink_frames=1, tempcache=PRESETS["small"])
    return {
        "full, torch attention": Choice(PolicySettings(), torch_attention=True),
        "full": Choice(PolicySettings()),
        "sink_window": Choice(PolicySettings(kind="sink_window", window_frames=window, sink_frames=1)),
        "tempcache": Choice(tempcache),
        "all": Choice(tempcache, pruned_and_sparse=True),
    }


def weights(model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random native weights, made on the device: names and shapes of a Wan text-to-video model."""
    dim, ffn = model.dim, model.ffn
    linears = {"patch_embedding": (dim, 16, 1, 2, 2), "text_embedding.0": (dim, TEXT_DIM), "text_embedding.2": (dim, dim),
               "time_embedding.0": (dim, 256), "time_embedding.2": (dim, dim), "time_projection.1": (6 * dim, dim),
               "head.head": (64, dim)}  # fmt: skip
    found = {"head.modulation": (1, 2, dim)}
    for layer in range(model.layers):
        name = f"blocks.{layer}"
        found[f"{name}.modulation"] = (1, 6, dim)
        linears |= {f"{name}.{kind}_attn.{part}": (dim, dim) for kind in ("self", "cross") for part in "qkvo"}
        linears |= {f"{name}.ffn.0": (ffn, dim), f"{name}.ffn.2": (dim, ffn), f"{name}.norm3": (dim,)}
        found |= {f"{name}.{kind}_attn.norm_{part}.weight": (dim,) for kind in ("self", "cross") for part in "qk"}
    for name, shape in linears.items():
        found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return {name: _random(name, shape, device, dtype) for name, shape in found.items()}


def _random(name: str, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if "norm" in name and name.endswith("weight"):
        return torch.ones(shape, device=device, dtype=dtype)
    width = shape[1] if len(shape) == 2 else max(shape)
    return (torch.randn(shape, device=device) * width**-0.5).to(dtype)


class Roller:
    """One rollout with one policy. The latents are random: what is timed does not depend on them."""

    def __init__(self, model: Model, made: dict[str, torch.Tensor], choice: Choice) -> None:
        self.model, self.weights = model, made
        some = made["head.modulation"]
        self.device, self.dtype = some.device, some.dtype
        geometry = RunGeometry(model.frames, model.block, model.rows, model.cols, model.layers)
        annca = AnnCASettings(keep="lsh") if choice.pruned_and_sparse else None
        # without a GPU sparse is never faster at this size, but its code shall run
        annsa = AnnSASettings(only_if_faster=self.device.type == "cuda") if choice.pruned_and_sparse else None
        rope = RopeSpec(model.dim // model.heads)
        self.run = RunState(choice.policy, geometry, rope, schedule=SIGMAS, annca=annca, annsa=annsa)
        if choice.torch_attention:
            self.run.attention.dense = _torch_attention
        self.text = torch.randn(1, TEXT_ROWS, TEXT_DIM, device=self.device).to(self.dtype)
        self.text[:, TEXT_ROWS // 4 :] = 0  # padding, as most of a prompt is

    @torch.no_grad()
    def call(self, phase: str, start: int, sigma: float, step: int = 0) -> None:
        model, count = self.model, self.model.block
        ctx = FwdCtx(phase, start, count, (sigma,) * count, (1000 * sigma,) * count, model.rows, model.cols, step)  # type: ignore[arg-type]
        x = torch.randn(1, 16, count, 2 * model.rows, 2 * model.cols, device=self.device).to(self.dtype)
        self.run.begin(ctx)
        policy = self.run.policy("positive")
        times = torch.tensor([ctx.timesteps], device=self.device)
        if self.run.prompts is not None:
            self.run.prompts.start_call(self.text, ["positive"], PromptCall(sigma, count, start))
        wan_forward(self.weights, x, times, self.text, num_heads=model.heads, cross=self.cross,
                    attend=lambda layer, q, k, v: policy.attend(layer, q, k, v, ctx))  # fmt: skip
        self.run.end()

    def cross(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Text attention: pruned where that is on and has something to say."""
        out = None if self.run.prompts is None else self.run.prompts.attend(layer, q, k, v)
        return _torch_attention(q, k, v) if out is None else out

    def block_seconds(self, start: int) -> float:
        """All model calls of one block and all work of the policy."""
        _wait(self.device)
        begun = time.perf_counter()
        for step, sigma in enumerate(SIGMAS):
            self.call("denoise", start, sigma, step)
        self.call("clean", start, 0.0)
        _wait(self.device)
        return time.perf_counter() - begun


def _torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def one(model: Model, made: dict[str, torch.Tensor], name: str, seconds: float) -> Row:
    """One policy, as many blocks as fit into ``seconds`` of running."""
    device = made["head.modulation"].device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    roller = Roller(model, made, policies(model)[name])
    times: list[float] = []
    cache: list[int] = []
    try:
        while sum(times) < seconds and (len(times) + 1) * model.block <= model.frames:
            times.append(roller.block_seconds(len(times) * model.block))
            cache.append(roller.run.bytes())
    except torch.OutOfMemoryError as error:
        return {"policy": name, "reason": f"out of memory after {len(times)} blocks: {error}".splitlines()[0][:200]}
    finally:
        roller.run.close()
    frames = PIXEL_FRAMES * model.block
    last = times[-3:]
    return {"policy": name, "latent_frames": len(times) * model.block, "fps_first_blocks": frames / min(times[1:4] or times),
            "fps_last_blocks": frames * len(last) / sum(last), "seconds": sum(times), "cache_bytes_end": cache[-1],
            "cache_bytes_middle": cache[len(cache) // 2], "peak_bytes": _peak(device)}  # fmt: skip


def run(device: torch.device, dtype: torch.dtype, seconds: float, say: Say) -> list[Row]:
    """All policies; ``seconds`` bounds each."""
    model = SMALL
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        model = Model()
        if model.cache_bytes * 2 > free:
            fitting = int(free / 2 / (model.cache_bytes / model.frames)) // model.block * model.block
            model = Model(frames=max(model.block * 4, fitting))
    made = weights(model, device, dtype)
    rows = []
    for name in policies(model):
        rows.append(one(model, made, name, seconds))
        say(f"  {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in rows[-1].items() if isinstance(value, float | int)))
    return rows
