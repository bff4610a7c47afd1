"""Merges LoRA files into a native state dict: PEFT files of LongLive and MemFlow, and the styles ComfyUI users have."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .checkpoint_keys import CERTAIN_PREFIXES, NATIVE_ROOTS, UNCERTAIN_PREFIXES, clean_infixes, from_diffusers, some
from .checkpoint_shapes import is_companion
from .errors import CheckpointError

_PREFIXES = ("base_model.model.", "generator.", *CERTAIN_PREFIXES, *UNCERTAIN_PREFIXES)
_FLAT_PREFIXES = ("lora_unet_", "lora_transformer_")
_PAIR = re.compile(r"^(?P<path>.+)\.(?P<part>lora_[AB]|lora_(down|up)|lora\.(down|up))(\.default)?(\.weight)?$")
_OTHER = re.compile(r"^(?P<path>.+)\.(?P<part>alpha|diff|diff_b)$")
_PARTS = {"lora_A": "down", "lora_down": "down", "lora.down": "down", "lora_B": "up", "lora_up": "up", "lora.up": "up"}
_WRAPPERS = ("generator_lora", "lora", "state_dict", "model")


@dataclass
class _Change:
    """All entries for one module: down [r, in], up [out, r], alpha, or plain differences of weight and bias."""

    parts: dict[str, torch.Tensor] = field(default_factory=dict)


def merge_lora(
    state: dict[str, torch.Tensor], content: Mapping[str, Any], metadata: Mapping[str, str], strength: float, name: str
) -> str:
    """Adds strength * (alpha / r) * up @ down to the weights of `state` (replaced in the dict, originals untouched).

    `content` is a read LoRA file. alpha is r where the file names none. Returns a line for the report; raises
    CheckpointError unless every entry fits a weight of the model.
    """
    changes = _collect(content, state, name)
    default_alpha = _default_alpha(metadata)
    ranks = set()
    for module, change in changes.items():
        if "up" in change.parts:
            ranks.add(change.parts["down"].shape[0])
            _add(state, f"{module}.weight", _product(change, default_alpha), strength, name)
        for part, leaf in (("diff", "weight"), ("diff_b", "bias")):
            if part in change.parts:
                _add(state, f"{module}.{leaf}", change.parts[part].float(), strength, name)
    told = "" if default_alpha is None else f", alpha {default_alpha:g} from the metadata"
    sizes = some(map(str, sorted(ranks))) or "none"
    return f"LoRA {name}: {len(changes)} modules changed, rank {sizes}{told}, strength {strength:g}"


def _default_alpha(metadata: Mapping[str, str]) -> float | None:
    try:
        return float(metadata["lora_alpha"])
    except (KeyError, ValueError):
        return None


def _collect(content: Mapping[str, Any], state: Mapping[str, torch.Tensor], name: str) -> dict[str, _Change]:
    flat = {key: value for key, value in _unwrap(content).items() if isinstance(value, torch.Tensor)}
    if not flat:
        raise CheckpointError(f"{name} holds no LoRA weights; choose a LoRA file, or 'none'")
    modules = {key.rpartition(".")[0].replace(".", "_"): key.rpartition(".")[0] for key in state}
    changes: dict[str, _Change] = {}
    unknown = []
    for key, value in flat.items():
        match = _PAIR.match(clean_infixes(key)) or _OTHER.match(clean_infixes(key))
        module = _module(match["path"], modules) if match else None
        if match is None or module is None or f"{module}.weight" not in state:
            unknown.append(key)
            continue
        part = _PARTS.get(match["part"], match["part"])
        if changes.setdefault(module, _Change()).parts.setdefault(part, value) is not value:
            raise CheckpointError(f"{name}: two entries for the {part} part of {module}; it holds more than one "
                                  "LoRA, choose a file with one")  # fmt: skip
    if unknown:
        raise CheckpointError(
            f"{name}: {len(unknown)} of {len(flat)} entries fit no weight of the model ({some(unknown)}); it is a "
            "LoRA of another model or of a kind that is not supported (DoRA, LoKr, LoHa): choose one made for this "
            "model, or 'none'"
        )
    _check_pairs(changes, state, name)
    return changes


def _unwrap(content: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in _WRAPPERS:
        if isinstance(content.get(key), Mapping):
            return _unwrap(content[key])
    prefix = "generator_lora."
    inside = {key[len(prefix) :]: value for key, value in content.items() if str(key).startswith(prefix)}
    return inside or {str(key): value for key, value in content.items()}


def _module(path: str, modules: Mapping[str, str]) -> str | None:
    """Native module name of a LoRA's path, e.g. 'blocks.0.self_attn.q'; None when it leads nowhere."""
    for flat in _FLAT_PREFIXES:
        if path.startswith(flat):
            return modules.get(path[len(flat) :])
    while not path.startswith(NATIVE_ROOTS) and not path.startswith(("condition_embedder.", "proj_out")):
        prefix = next((p for p in _PREFIXES if path.startswith(p)), None)
        if prefix is None:
            return None
        path = path[len(prefix) :]
    if re.search(r"\.attn[12]\.|\.ffn\.net\.|^condition_embedder|^proj_out", path):
        path = from_diffusers(path + ".")[:-1]
    return path


def _check_pairs(changes: Mapping[str, _Change], state: Mapping[str, torch.Tensor], name: str) -> None:
    for module, change in changes.items():
        parts = change.parts
        if ("up" in parts) != ("down" in parts) or set(parts) == {"alpha"}:
            raise CheckpointError(f"{name}: {module} has only {some(sorted(parts))}, expected both halves of a LoRA "
                                  "(A and B); the file is incomplete, download it again")  # fmt: skip
        if "up" not in parts:
            continue
        weight, up, down = state[f"{module}.weight"], parts["up"].flatten(1), parts["down"].flatten(1)
        if up.shape[0] != weight.shape[0] or down.shape[1] != weight[0].numel() or up.shape[1] != down.shape[0]:
            raise CheckpointError(
                f"{name}: {module} changes a weight [{up.shape[0]}, {down.shape[1]}] with ranks {up.shape[1]} and "
                f"{down.shape[0]}, the model's is {list(weight.shape)}; it was made for a model of another size"
            )


def _product(change: _Change, default_alpha: float | None) -> torch.Tensor:
    up, down = change.parts["up"].float().flatten(1), change.parts["down"].float().flatten(1)
    rank = down.shape[0]
    alpha = float(change.parts["alpha"]) if "alpha" in change.parts else default_alpha
    return (rank if alpha is None else alpha) / rank * (up @ down)


def _add(state: dict[str, torch.Tensor], key: str, change: torch.Tensor, strength: float, name: str) -> None:
    weight = state.get(key)
    if weight is None or change.numel() != weight.numel():
        have = "absent" if weight is None else f"of shape {list(weight.shape)}"
        raise CheckpointError(f"{name}: the change of {key} has the shape {list(change.shape)}, the model's weight "
                              f"is {have}; the LoRA was made for another model")  # fmt: skip
    module = key.rpartition(".")[0]
    if weight.element_size() < 2 or any(is_companion(k) and k.startswith(f"{module}.") for k in state):
        raise CheckpointError(
            f"{name}: {key} is stored in 8 bits or fewer ({weight.dtype}), where merging would lose the change; use "
            "the model's bf16 or fp16 file, or set lora to 'none' and add the LoRA with the stock "
            "LoraLoaderModelOnly node"
        )
    state[key] = (weight.float() + strength * change.reshape(weight.shape)).to(weight.dtype)
