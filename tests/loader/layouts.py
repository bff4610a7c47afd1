"""Tiny random weights, written in every layout in which checkpoints of the families are published."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]
DIM, FFN, TEXT, LAYERS = 128, 48, 24, 2
# Native module name -> name in the diffusers layout, inside a block; written down here independently of the loader.
DIFFUSERS_BLOCK = {
    "modulation": "scale_shift_table",
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "self_attn.norm_q": "attn1.norm_q",
    "self_attn.norm_k": "attn1.norm_k",
    "cross_attn.norm_q": "attn2.norm_q",
    "cross_attn.norm_k": "attn2.norm_k",
    "self_attn.o": "attn1.to_out.0",
    "cross_attn.o": "attn2.to_out.0",
    **{f"self_attn.{part}": f"attn1.to_{part}" for part in "qkv"},
    **{f"cross_attn.{part}": f"attn2.to_{part}" for part in "qkv"},
}
DIFFUSERS_TOP = {
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
    "patch_embedding": "patch_embedding",
}


def native(seed: int, dim: int = DIM, text: int = TEXT) -> Weights:
    """A complete native state dict (69 names, float32); norm weights are 1."""
    sizes: dict[str, tuple[int, ...]] = {"head.modulation": (1, 2, dim)}
    linears = {
        "patch_embedding": (dim, 16, 1, 2, 2), "text_embedding.0": (dim, text), "text_embedding.2": (dim, dim),
        "time_embedding.0": (dim, 256), "time_embedding.2": (dim, dim), "time_projection.1": (6 * dim, dim),
        "head.head": (64, dim),
    }  # fmt: skip
    for i in range(LAYERS):
        sizes[f"blocks.{i}.modulation"] = (1, 6, dim)
        linears |= {f"blocks.{i}.{a}_attn.{p}": (dim, dim) for a in ("self", "cross") for p in "qkvo"}
        linears |= {f"blocks.{i}.ffn.0": (FFN, dim), f"blocks.{i}.ffn.2": (dim, FFN), f"blocks.{i}.norm3": (dim,)}
        sizes |= {f"blocks.{i}.{a}_attn.norm_{p}.weight": (dim,) for a in ("self", "cross") for p in "qk"}
    for name, shape in linears.items():
        sizes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    draw = torch.Generator().manual_seed(seed)
    return {
        key: torch.ones(shape) if "norm" in key and "weight" in key else torch.randn(shape, generator=draw) * 0.05
        for key, shape in sizes.items()
    }


def prefixed(weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {prefix + key: value for key, value in weights.items()}


def fsdp(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The infix right after the prefix and once more inside every block, as sharded training leaves it."""
    infix = "_fsdp_wrapped_module."
    inner = {}
    for key, value in weights.items():
        parts = key.split(".", 2)
        inner[f"{parts[0]}.{parts[1]}.{infix}{parts[2]}" if parts[0] == "blocks" else key] = value
    return prefixed(inner, "model." + infix)


def diffusers(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Names as the diffusers library writes them."""
    renamed: dict[str, Any] = {}
    for key, value in weights.items():
        if key == "head.modulation":
            renamed["scale_shift_table"] = value
        elif key.startswith("blocks."):
            number, rest = key.split(".", 2)[1:]
            module, _, leaf = rest.rpartition(".")
            renamed[f"blocks.{number}.{DIFFUSERS_BLOCK[module]}.{leaf}" if module else
                    f"blocks.{number}.{DIFFUSERS_BLOCK[rest]}"] = value  # fmt: skip
        else:
            module, _, leaf = key.rpartition(".")
            renamed[f"{DIFFUSERS_TOP[module]}.{leaf}"] = value
    return renamed


def extras() -> Weights:
    """Entries of training code that are no part of a generator."""
    return {
        "model._cls_pred_branch.0.weight": torch.ones(2, 2),
        "model._register_tokens": torch.ones(1, 2),
        "model._gan_ca_blocks.0.self_attn.q.weight": torch.ones(2, 2),
        "model.freqs": torch.ones(4, 2, dtype=torch.complex64),
    }


def optimizer() -> dict[str, Any]:
    return {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-4}]}


# name -> (file ending, content for (weights, other weights)); the first are those that must come out with use_ema.
LAYOUTS: dict[str, tuple[str, Callable[[Weights, Weights], Mapping[str, Any]]]] = {
    "self_forcing": (".pt", lambda w, o: {
        "generator": prefixed(o, "model."), "critic": prefixed(o, "model."), "generator_ema": prefixed(w, "model.")}),
    "causal_forcing_fsdp": (".pt", lambda w, o: {"generator": prefixed(o, "model."), "generator_ema": fsdp(w)}),
    "rolling_forcing_fsdp": (".pt", lambda w, _: {"generator_ema": fsdp(w), "step": 3000}),
    "longlive_base": (".pt", lambda w, _: {"generator": prefixed(w, "model.")}),
    "longlive_model_entry": (".pt", lambda w, _: {"model": prefixed(w, "model."), "checkpoint_format": "bf16"}),
    "causvid": (".pt", lambda w, _: {"generator": {**prefixed(w, "model."), **extras()}, "optimizer": optimizer()}),
    "krea": (".safetensors", lambda w, _: prefixed(w, "model.")),
    "native": (".safetensors", lambda w, _: w),
    "native_pt": (".pt", lambda w, _: w),
    "state_dict_entry": (".pt", lambda w, _: {
        "state_dict": prefixed(w, "model."), "optimizer": optimizer(), "epoch": 1}),
    "nested_twice": (".pt", lambda w, _: {"generator_ema": {"model": w, "step": 7}}),
    "only_entry": (".pt", lambda w, _: {"weights": prefixed(w, "net.")}),
    "flat_generators": (".safetensors", lambda w, o: {
        **prefixed(prefixed(w, "model."), "generator_ema."), **prefixed(prefixed(o, "model."), "generator.")}),
    "full_checkpoint": (".safetensors", lambda w, o: {
        **prefixed(w, "model.diffusion_model."), "first_stage_model.decoder.conv1.weight": torch.ones(2),
        "text_encoders.umt5xxl.shared.weight": torch.ones(2)}),
    "comfyui": (".safetensors", lambda w, _: prefixed(w, "diffusion_model.")),
    "longvie_prefix": (".safetensors", lambda w, _: prefixed(w, "pipe.dual_controller.")),
    "data_parallel": (".pt", lambda w, _: prefixed(prefixed(w, "model."), "module.")),
    "compiled": (".pt", lambda w, _: prefixed(w, "_orig_mod.")),
    "diffusers": (".safetensors", lambda w, _: diffusers(w)),
    "diffusers_nested": (".pt", lambda w, _: {"generator_ema": prefixed(diffusers(w), "transformer.")}),
}  # fmt: skip


def write(
    path: Path, content: Mapping[str, Any], metadata: Mapping[str, Any] | None = None, zipped: bool = True
) -> Path:
    """Write by the file ending; `metadata` (safetensors) holds the host's 'transformer' configuration."""
    if path.suffix == ".safetensors":
        header = None if metadata is None else {"config": json.dumps({"transformer": dict(metadata)})}
        save_file({key: value.clone() for key, value in content.items()}, path, metadata=header)
    else:
        torch.save(dict(content), path, _use_new_zipfile_serialization=zipped)
    return path
