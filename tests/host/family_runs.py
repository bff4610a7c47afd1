"""Every family from a file in its published layout to a finished video: loader node, streaming sampler node, tiny weights.

As a script, on a given host, the latents saved to a file for comparison:

    python family_runs.py HOST_CHECKOUT WORK_FOLDER OUT.safetensors
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from typing import Any

import torch
from torch import Tensor

from tests_support import Host, load_pack, start_host

load_pack()

from fastar_pack.fastar_core.noise import seeded_normal  # noqa: E402 (the pack has to be registered first)
from loader.layouts import LAYOUTS, TEXT, Weights, fsdp, native, prefixed, write  # noqa: E402

WIDTH, HEIGHT, SEED = 48, 32, 5
WEIGHTS, OTHER = native(1), native(2)
# more of everything than trained files have, so that attention, text and LoRA show in the result
for _key, _value in WEIGHTS.items():
    if _value.ndim > 1:
        _value *= 2.2
    elif "norm_" in _key:
        _value *= 1.6
LORA_RANK = 4


@dataclass(frozen=True)
class Family:
    """``content`` of the file ``name``; ``latents`` of the video; ``calls``: model calls per phase, by hand."""

    name: str
    content: Callable[[], Mapping[str, Any]]
    latents: int
    calls: dict[str, int]
    key: str
    preset: str = "auto"
    lora: bool = False
    cfg: float = 1.0
    switch: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return 4 * self.latents - 3


def _layout(name: str) -> Callable[[], Mapping[str, Any]]:
    return lambda: LAYOUTS[name][1](WEIGHTS, OTHER)


def _both(first: str) -> Callable[[], Mapping[str, Any]]:
    """A file with both sets of weights of which ``first`` is the right one."""
    second = "generator" if first == "generator_ema" else "generator_ema"
    return lambda: {first: prefixed(WEIGHTS, "model."), second: prefixed(OTHER, "model.")}


def _fsdp(entry: str) -> Callable[[], Mapping[str, Any]]:
    return lambda: {entry: fsdp(WEIGHTS), "step": 1000}


FAMILIES = {
    "self_forcing": Family("self_forcing_dmd.pt", _layout("self_forcing"), 9, {"denoise": 12, "clean": 2}, "self_forcing"),
    "self_forcing_teacher": Family("ode.pt", _both("generator_ema"), 6, {"denoise": 100, "clean": 1}, "self_forcing_teacher",
                                   "self_forcing_teacher", cfg=3.0),
    "causal_forcing_chunkwise": Family("Causal-Forcing/chunkwise/causal_forcing.pt", _both("generator"), 8,
                                       {"denoise": 12, "clean": 2}, "causal_forcing_chunkwise"),
    "causal_forcing_framewise_4step": Family("Causal-Forcing/framewise/causal_forcing.pt", _both("generator_ema"), 5,
                                             {"denoise": 20, "clean": 4}, "causal_forcing_framewise_4step"),
    "causal_forcing_framewise_2step": Family("causal-forcing++/framewise-2step.pt", _fsdp("generator_ema"), 5,
                                             {"denoise": 12, "clean": 4}, "causal_forcing_framewise_2step"),
    "causal_forcing_framewise_1step": Family("causal-forcing++/framewise-1step.pt", _fsdp("generator_ema"), 5,
                                             {"denoise": 8, "clean": 4}, "causal_forcing_framewise_1step"),
    "causal_forcing_teacher": Family("Causal-Forcing/chunkwise/ar_diffusion.pt", _both("generator_ema"), 6,
                                     {"denoise": 100, "clean": 1}, "causal_forcing_teacher", cfg=3.0),
    "causal_forcing_longvideo": Family("Causal-Forcing/chunkwise/longvideo.pt", _fsdp("generator_ema"), 24,
                                       {"denoise": 11, "clean": 7}, "causal_forcing_longvideo"),
    "rolling_forcing": Family("rolling_forcing_dmd.pt", _layout("rolling_forcing_fsdp"), 30, {"denoise": 14, "clean": 9},
                              "rolling_forcing"),
    "rolling_forcing extended": Family("rolling_forcing_dmd.pt", _layout("rolling_forcing_fsdp"), 30,
                                       {"denoise": 14, "clean": 9}, "rolling_forcing", options={"cache": "full"}),
    "longlive1": Family("longlive_base.pt", _layout("longlive_base"), 24, {"denoise": 32, "clean": 7, "recache": 1}, "longlive1",
                        lora=True, switch=15),
    "longlive1_infinity": Family("longlive_base.pt", _layout("longlive_model_entry"), 24,
                                 {"denoise": 32, "clean": 7, "recache": 1}, "longlive1_infinity", "longlive1_infinity", lora=True,
                                 switch=15),
    "longlive1 rebuilt": Family("longlive_base.pt", _layout("longlive_base"), 18, {"denoise": 24, "clean": 5, "prefill": 5},
                                "longlive1", lora=True, switch=15, options={"prompt_switch": "rebuild"}),
    "causvid": Family("CausVid/autoregressive_checkpoint/model.pt", _layout("causvid"), 27,
                      {"denoise": 27, "clean": 7, "prefill": 1}, "causvid"),
    "krea": Family("krea-realtime-video-14b.safetensors", _layout("krea"), 15, {"denoise": 25, "clean": 1, "prefill": 3}, "krea"),
}


def lora() -> dict[str, Tensor]:
    """A PEFT LoRA over the linear layers of all blocks."""
    draw, made = torch.Generator().manual_seed(6), {}
    for key, value in WEIGHTS.items():
        if key.startswith("blocks.") and key.endswith(".weight") and value.ndim == 2:
            name = f"base_model.model.{key.removesuffix('.weight')}"
            made[f"{name}.lora_A.weight"] = 0.1 * torch.randn(LORA_RANK, value.shape[1], generator=draw)
            made[f"{name}.lora_B.weight"] = 0.1 * torch.randn(value.shape[0], LORA_RANK, generator=draw)
    return made


def merged() -> Weights:
    """The weights with the LoRA in them."""
    halves, out = lora(), dict(WEIGHTS)
    for name in {key.rsplit(".lora_", 1)[0] for key in halves}:
        key = name.removeprefix("base_model.model.") + ".weight"
        out[key] = out[key] + halves[f"{name}.lora_B.weight"] @ halves[f"{name}.lora_A.weight"]
    return out


def text(seed: int) -> list[Any]:
    """CONDITIONING of one entry."""
    return [[seeded_normal(seed, (1, 7, TEXT)), {}]]


def place(host: Host, kind: str, name: str, content: Mapping[str, Any]) -> None:
    path = host.base / "models" / kind / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, content)


def load(host: Host, family: Family) -> tuple[Any, str]:
    """Writes the file and loads it through the node: MODEL and report."""
    place(host, "diffusion_models", family.name, family.content())
    if family.lora:
        place(host, "loras", "lora.pt", {"generator_lora": lora()})
    chosen = {"lora": "lora.pt"} if family.lora else {}
    return host.nodes["FastARLoadModel"]().load(family.name, family.preset, "default", **chosen)


def run(host: Host, family: Family, vae: Any, **changes: Any) -> tuple[Tensor, Tensor, str, str]:
    """Latents [1, 16, T, h, w], images, report of the sampler, report of the loader."""
    model, loaded = load(host, family)
    given: dict[str, Any] = {
        "width": WIDTH, "height": HEIGHT, "length": family.length, "fps": 0.0, "seed": SEED, "cfg": family.cfg, "preset": "auto",
        "cache": "preset", "window": 9, "sink": 3, "frames_to": "memory", "decode": "auto", "filename_prefix": "video/test",
        "batch_size": 1, "positive": text(1), "negative": text(2) if family.cfg != 1 else None, **family.options, **changes}
    if family.switch is not None:
        given["prompts"] = [(0, given["positive"]), (family.switch, text(3))]
    latent, images, _, report = host.nodes["FastARStreamingSampler"]().sample(model=model, vae=vae, **given)["result"]
    return latent["samples"], images, report, loaded


def all_runs(host: Host) -> dict[str, Tensor]:
    """Latents of every family."""
    from host.stream_parts import tiny_wan_vae

    vae = tiny_wan_vae()
    return {name: run(host, family, vae)[0].contiguous() for name, family in FAMILIES.items()}


def main(checkout: str, folder: str, target: str) -> None:
    torch.set_num_threads(1)
    host = start_host(Path(checkout), Path(folder))
    from safetensors.torch import save_file

    save_file(all_runs(host), target, {"version": host.version})


if __name__ == "__main__":
    main(*sys.argv[1:])
