"""Names of weights: from the ways in which Wan-layout checkpoints are published to the native one (backbones 1.3)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import CheckpointError

INFIXES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
CERTAIN_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "pipe.dual_controller.", "net.", "transformer.")
UNCERTAIN_PREFIXES = ("model.", "module.")
NATIVE_ROOTS = (
    "patch_embedding.", "text_embedding.", "time_embedding.", "time_projection.", "blocks.", "head.", "img_emb.",
)  # fmt: skip
QUANT_SUFFIXES = (
    ".scale_weight", ".scale_input", ".weight_scale", ".weight_scale_2", ".input_scale", ".comfy_quant",
)  # fmt: skip
_GENERATORS = ("generator", "generator_ema")
_WRAPPERS = ("model", "state_dict", "module")
_IGNORED = {
    "discriminator or critic": re.compile(
        r"_cls_pred_branch|_register_tokens|_gan_ca_blocks|^(critic|discriminator|fake_score|real_score)\."
    ),
    "optimizer": re.compile(r"^(optimizer|optim|lr_scheduler|scheduler)[._]"),
    "rope tables": re.compile(r"(^|\.)(freqs|freqs_cis|freqs_cos|freqs_sin|rope\.freqs|inv_freq)$"),
}
_DIFFUSERS_TOP = {
    "condition_embedder.text_embedder.linear_1.": "text_embedding.0.",
    "condition_embedder.text_embedder.linear_2.": "text_embedding.2.",
    "condition_embedder.time_embedder.linear_1.": "time_embedding.0.",
    "condition_embedder.time_embedder.linear_2.": "time_embedding.2.",
    "condition_embedder.time_proj.": "time_projection.1.",
    "condition_embedder.image_embedder.norm1.": "img_emb.proj.0.",
    "condition_embedder.image_embedder.ff.net.0.proj.": "img_emb.proj.1.",
    "condition_embedder.image_embedder.ff.net.2.": "img_emb.proj.3.",
    "condition_embedder.image_embedder.norm2.": "img_emb.proj.4.",
    "proj_out.": "head.head.",
}
# norm2 and norm3 change places between the two layouts: native norm3 is the affine norm before cross-attention.
_DIFFUSERS_BLOCK = {
    "attn1.to_out.0.": "self_attn.o.", "attn2.to_out.0.": "cross_attn.o.",
    "attn1.to_": "self_attn.", "attn2.to_": "cross_attn.",
    "attn2.add_k_proj.": "cross_attn.k_img.", "attn2.add_v_proj.": "cross_attn.v_img.",
    "attn2.norm_added_k.": "cross_attn.norm_k_img.",
    "attn1.": "self_attn.", "attn2.": "cross_attn.",
    "ffn.net.0.proj.": "ffn.0.", "ffn.net.2.": "ffn.2.",
    "norm2.": "norm3.", "norm3.": "norm2.",
}  # fmt: skip
_BLOCK = re.compile(r"^(blocks\.\d+\.)(.+)$")


@dataclass
class Findings:
    """What reading a file showed: `found` in words, `ignored` entries by group, `warnings` in words."""

    found: list[str] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)


def some(names: Iterable[str], shown: int = 4) -> str:
    """The first few names and how many more there are."""
    listed = list(names)
    rest = len(listed) - shown
    return ", ".join(listed[:shown]) + (f" and {rest} more" if rest > 0 else "")


def clean_infixes(key: str) -> str:
    """`key` without the names that wrappers of the training code put in, wherever they stand."""
    for infix in INFIXES:
        key = key.replace(infix, "")
    return key


def pick_state_dict(content: Mapping[str, Any], use_ema: bool, findings: Findings) -> dict[str, torch.Tensor]:
    """The one flat dict of tensors meant by the preset, out of a possibly nested file."""
    content = _regroup(content)
    for _ in range(4):
        chosen = _choose_entry(content, use_ema, findings)
        if chosen is None:
            break
        _ignore_entries(content, [chosen], findings)
        findings.found.append(f"weights taken from the entry '{chosen}'")
        content = content[chosen]
    tensors = {key: value for key, value in content.items() if isinstance(value, torch.Tensor)}
    _ignore_entries(content, tensors, findings)
    return tensors


def _ignore_entries(content: Mapping[str, Any], kept: Container[str], findings: Findings) -> None:
    for key, value in content.items():
        if key not in kept:
            findings.ignored[f"entry '{key.partition('.')[0]}'"] += len(value) if isinstance(value, Mapping) else 1


def _regroup(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """A flat file with names like generator_ema.model.blocks... is read like the nested one it was made from."""
    nested: dict[str, Any] = {}
    for key, value in content.items():
        root, _, rest = str(key).partition(".")
        if root in _GENERATORS and rest:
            nested.setdefault(root, {})[rest] = value
        else:
            nested[str(key)] = value
    return nested


def _choose_entry(content: Mapping[str, Any], use_ema: bool, findings: Findings) -> str | None:
    wanted, other = ("generator_ema", "generator") if use_ema else ("generator", "generator_ema")
    for key in (wanted, other):
        if isinstance(content.get(key), Mapping):
            if key == other:
                findings.warnings.append(
                    f"the preset expects the entry '{wanted}', the file has only '{other}', which is used instead; "
                    "results may differ from the authors'"
                )
            return key
    for key in _WRAPPERS:
        if isinstance(content.get(key), Mapping):
            return key
    mappings = [key for key, value in content.items() if isinstance(value, Mapping)]
    return mappings[0] if len(mappings) == 1 == len(content) and mappings[0] != "generator_lora" else None


def native_names(tensors: Mapping[str, torch.Tensor], findings: Findings) -> dict[str, torch.Tensor]:
    """Tensors under native names; what belongs to no generator is counted in `findings.ignored`.

    Raises CheckpointError when prefixes are mixed or two entries end up under one name.
    """
    kept: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        _put(kept, clean_infixes(key), key, value)
    kept = _drop_ignored(kept, findings)
    for _ in range(3):
        stripped = _strip_prefix(kept, findings)
        if stripped is None:
            break
        kept = _drop_ignored(stripped, findings)
    if not any("condition_embedder." in key for key in kept):
        return kept
    findings.found.append("diffusers names translated")
    native: dict[str, torch.Tensor] = {}
    for key, value in kept.items():
        _put(native, from_diffusers(key), key, value)
    return native


def _put(target: dict[str, torch.Tensor], name: str, source: str, value: torch.Tensor) -> None:
    if name in target:
        raise CheckpointError(f"'{source}' and another entry both mean the weight '{name}'; the file mixes two models, "
                              "choose one that holds a single model")  # fmt: skip
    target[name] = value


def _drop_ignored(tensors: dict[str, torch.Tensor], findings: Findings) -> dict[str, torch.Tensor]:
    kept = {}
    for key, value in tensors.items():
        group = next((name for name, pattern in _IGNORED.items() if pattern.search(key)), None)
        if group is None:
            kept[key] = value
        else:
            findings.ignored[group] += 1
    return kept


def _strip_prefix(tensors: dict[str, torch.Tensor], findings: Findings) -> dict[str, torch.Tensor] | None:
    """One leading prefix off, or None when there is none. 'model.' and 'module.' go only if every name has them."""
    for prefix in (*CERTAIN_PREFIXES, *UNCERTAIN_PREFIXES):
        inside = {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
        if not any(_leads_to_model(key) for key in inside):
            continue
        outside = [key for key in tensors if not key.startswith(prefix)]
        mixed = [key for key in outside if prefix in UNCERTAIN_PREFIXES or key.startswith(NATIVE_ROOTS)]
        if mixed:
            raise CheckpointError(
                f"{len(inside)} names begin with '{prefix}' and {len(mixed)} do not ({some(mixed)}); a model file "
                "has the prefix everywhere or nowhere, so this one was put together wrongly: download the original "
                "again"
            )
        findings.found.append(f"prefix '{prefix}' removed")
        findings.ignored.update({f"outside of '{prefix}'": len(outside)} if outside else {})
        return inside
    return None


def _leads_to_model(key: str) -> bool:
    """True when a weight of the network's layout is behind at most some more prefixes."""
    prefix = next((p for p in (*CERTAIN_PREFIXES, *UNCERTAIN_PREFIXES) if key.startswith(p)), None)
    if prefix is None:
        return key.startswith((*NATIVE_ROOTS, "condition_embedder."))
    return _leads_to_model(key[len(prefix) :])


def from_diffusers(key: str) -> str:
    """Native name of a diffusers name; other names come back unchanged."""
    if key == "scale_shift_table":
        return "head.modulation"
    for old, new in _DIFFUSERS_TOP.items():
        if key.startswith(old):
            return new + key[len(old) :]
    match = _BLOCK.match(key)
    if match is None:
        return key
    block, rest = match.groups()
    if rest == "scale_shift_table":
        return block + "modulation"
    for old, new in _DIFFUSERS_BLOCK.items():
        if rest.startswith(old):
            return block + new + rest[len(old) :]
    return key
