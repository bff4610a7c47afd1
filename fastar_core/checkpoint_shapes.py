"""What a complete Wan-layout state dict looks like: sizes told from shapes, names, and what else a file may be."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from .checkpoint_keys import NATIVE_ROOTS, QUANT_SUFFIXES, some
from .errors import CheckpointError

FREQ_DIM = 256
STOCK_TEXT_DIM = 4096
STOCK_HEAD_DIM = 128
_ATTENTION_PARTS = ("q", "k", "v", "o")
_SIZE_KEYS = ("head.modulation", "head.head.weight", "patch_embedding.weight", "blocks.0.ffn.0.weight",
              "text_embedding.0.weight")  # fmt: skip
_VARIANTS = (
    (re.compile(r"^vace_"), "VACE control"),
    (re.compile(r"\.action_model\."), "Matrix-Game action"),
    (re.compile(r"^control_adapter\."), "camera control"),
    (re.compile(r"^(casual_audio_encoder|audio_proj|audio_injector)\."), "speech"),
    (re.compile(r"^(face_adapter|motion_encoder|pose_patch_embedding)"), "character animation"),
    (re.compile(r"^fps_(embedding|projection)"), "SkyReels"),
    (re.compile(r"^control_(blocks|initial|text|t_mod|combine)"), "LongVie controller"),
    (re.compile(r"^(patch_embedding_|ref_conv|img_emb\.emb_pos)"), "reference-image"),
)
_FOREIGN = (
    (re.compile(r"lora_(A|B|up|down)\b|\.lora\.(up|down)|generator_lora"),
     "a LoRA; choose it as 'lora' and the base model of its family as the model"),
    (re.compile(r"^(model\.diffusion_model\.)?(input_blocks|middle_block|output_blocks)\.|^down_blocks\.|^up_blocks\."),
     "a Stable Diffusion image model (U-Net)"),
    (re.compile(r"(^|\.)(double_blocks|single_blocks|joint_blocks|single_transformer_blocks)\."),
     "an image or Hunyuan model"),
    (re.compile(r"^videodit_blocks\."), "a MAGI-1 model, whose layout is another one"),
    (re.compile(r"^(vae\.)?(decoder|encoder)\..*(conv|residual|downsamples|upsamples)|^first_stage_model\."), "a VAE"),
    (re.compile(r"^shared\.weight|^encoder\.block\.|^token_embedding\.weight|^(language_)?model\.layers\.|^text_model\."),
     "a text encoder"),
    (re.compile(r"^(transformer_)?blocks\."), "another transformer, not of the Wan layout"),
)  # fmt: skip


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Wan-layout model; `image_input` tells the I2V layout with its extra image keys."""

    dim: int
    layers: int
    heads: int
    ffn: int
    in_channels: int
    out_channels: int
    text_dim: int
    image_input: bool

    def __str__(self) -> str:
        kind = "image-to-video layout" if self.image_input else "text-to-video layout"
        return (f"{kind}, {self.layers} layers, width {self.dim}, {self.heads} heads, feed-forward {self.ffn}, "
                f"{self.in_channels} -> {self.out_channels} channels, text width {self.text_dim}")  # fmt: skip


def transformer_config(metadata: Mapping[str, str]) -> dict[str, object]:
    """The 'transformer' part of the metadata entry 'config' that ComfyUI reads; {} when absent or no JSON."""
    try:
        config = json.loads(metadata.get("config", "{}"))
    except json.JSONDecodeError:
        return {}
    part = config.get("transformer", {}) if isinstance(config, dict) else {}
    return part if isinstance(part, dict) else {}


def check_state_dict(state: Mapping[str, torch.Tensor], metadata: Mapping[str, str], name: str) -> ModelShape:
    """Sizes of a complete state dict under native names; CheckpointError says what is missing, surplus or misshapen."""
    if not any(key in state for key in _SIZE_KEYS):
        raise CheckpointError(not_wan(state, name))
    layers = _count_layers(state, name)
    image = any(key.startswith("img_emb.") or ".k_img." in key or ".v_img." in key for key in state)
    expected = expected_names(layers, image)
    _check_names(state, expected, name)
    shape = _infer(state, layers, image, metadata, name)
    quantised = {key[: key.rindex(".")] + ".weight" for key in state if key.endswith(QUANT_SUFFIXES)}
    wrong = [
        f"{key} {tuple(state[key].shape)} instead of {want}"
        for key, want in _shapes(shape).items()
        if key not in quantised and tuple(state[key].shape) != want
    ]
    if wrong:
        raise CheckpointError(
            f"{name}: {len(wrong)} weights do not fit a model of width {shape.dim}: {some(wrong, 3)}. The file mixes "
            "sizes or is damaged; download the original again"
        )
    return shape


def not_wan(names: Iterable[str], name: str) -> str:
    """What a file without the Wan layout most likely is, and what to choose instead."""
    keys = list(names)
    if not keys:
        return f"{name} holds no weights at all; choose the model file of a supported family"
    kinds = [what for pattern, what in _FOREIGN if any(pattern.search(key) for key in keys)]
    what = kinds[0] if kinds else "no video model of the Wan layout"
    if not what.startswith("a LoRA"):
        what += "; choose the model file of a supported family (Self-Forcing, Causal-Forcing, ...)"
    return f"{name} looks like {what}. Its {len(keys)} entries begin with {some(sorted(keys), 3)}"


def _count_layers(state: Mapping[str, torch.Tensor], name: str) -> int:
    present = {int(key.split(".")[1]) for key in state if key.startswith("blocks.") and key.split(".")[1].isdigit()}
    gaps = [str(i) for i in range(max(present, default=0) + 1) if i not in present]
    if gaps:
        raise CheckpointError(f"{name}: layer {some(gaps)} of {max(present, default=0) + 1} is missing altogether."
                              f"{_shard_hint(name)} Choose a complete file")  # fmt: skip
    return len(present)


def _shard_hint(name: str) -> str:
    if re.search(r"\d+-of-\d+", name):
        return " The name says that it is one part of several; join the parts into one file first."
    return ""


def expected_names(layers: int, image: bool) -> dict[str, None]:
    """All weight names of a model, in order (27 per layer and 15 more; the image layout has 5 and 8 on top)."""
    names = [f"{module}.{leaf}" for module in (
        "patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0", "time_embedding.2",
        "time_projection.1", "head.head") for leaf in ("weight", "bias")]  # fmt: skip
    names.append("head.modulation")
    for i in range(layers):
        modules = [f"{attn}.{part}" for attn in ("self_attn", "cross_attn") for part in _ATTENTION_PARTS]
        modules += ["norm3", "ffn.0", "ffn.2", *(("cross_attn.k_img", "cross_attn.v_img") if image else ())]
        names += [f"blocks.{i}.{module}.{leaf}" for module in modules for leaf in ("weight", "bias")]
        norms = [f"{attn}.norm_{part}" for attn in ("self_attn", "cross_attn") for part in "qk"]
        norms += ["cross_attn.norm_k_img"] if image else []
        names += [f"blocks.{i}.{norm}.weight" for norm in norms] + [f"blocks.{i}.modulation"]
    if image:
        names += [f"img_emb.proj.{i}.{leaf}" for i in (0, 1, 3, 4) for leaf in ("weight", "bias")]
    return dict.fromkeys(names)


def _check_names(state: Mapping[str, torch.Tensor], expected: Mapping[str, None], name: str) -> None:
    missing = [key for key in expected if key not in state]
    surplus = [key for key in state if key not in expected and not is_companion(key)]
    for pattern, kind in _VARIANTS:
        if any(pattern.search(key) for key in surplus):
            raise CheckpointError(
                f"{name} is a {kind} variant of Wan (it holds {some(k for k in surplus if pattern.search(k))}), "
                "which this pack cannot sample; choose a plain streaming checkpoint (Self-Forcing, Causal-Forcing, ...)"
            )
    if missing:
        raise CheckpointError(
            f"{name}: {len(missing)} of {len(expected)} weights are missing: {some(missing)}.{_shard_hint(name)}"
            f"{' Unknown instead: ' + some(surplus) + '.' if surplus else ''} Choose a complete file of one model"
        )
    inside = [key for key in surplus if key.startswith(NATIVE_ROOTS)]
    if inside:
        raise CheckpointError(f"{name}: {len(inside)} weights belong to no known layer: {some(inside)}. The model is "
                              "a variant that this pack does not know; choose a plain streaming "
                              "checkpoint")  # fmt: skip


def is_companion(key: str) -> bool:
    """True for the scales and marks that quantised files carry beside their weights."""
    return key.endswith(QUANT_SUFFIXES) or key == "scaled_fp8"


def _infer(
    state: Mapping[str, torch.Tensor], layers: int, image: bool, metadata: Mapping[str, str], name: str
) -> ModelShape:
    dim = _length(state, "head.modulation", -1, name)
    told = transformer_config(metadata).get("num_heads")
    heads = told if isinstance(told, int) else dim // STOCK_HEAD_DIM
    if heads < 1 or dim % heads or (dim // heads) % 2 or dim // heads < 12:
        raise CheckpointError(
            f"{name}: width {dim} with {heads} heads is not usable (each head needs an even size of at least 12). "
            f"Without metadata there is one head per {STOCK_HEAD_DIM}; give the true number in the safetensors "
            "metadata as "
            'config = {"transformer": {"num_heads": N}}'
        )
    return ModelShape(
        dim=dim, layers=layers, heads=heads, ffn=_length(state, "blocks.0.ffn.0.bias", 0, name),
        in_channels=_length(state, "patch_embedding.weight", 1, name),
        out_channels=_length(state, "head.head.bias", 0, name) // 4,
        text_dim=_length(state, "text_embedding.0.weight", 1, name), image_input=image,
    )  # fmt: skip


def _length(state: Mapping[str, torch.Tensor], key: str, axis: int, name: str) -> int:
    shape = state[key].shape
    if len(shape) <= max(axis, 0):
        raise CheckpointError(f"{name}: {key} has the shape {tuple(shape)}, one with more axes was expected; the "
                              "file is damaged or of another model, choose another one")  # fmt: skip
    return shape[axis]


def _shapes(m: ModelShape) -> dict[str, tuple[int, ...]]:
    """Shape of every weight that is not a plain vector or square of the width."""
    special = {
        "patch_embedding.weight": (m.dim, m.in_channels, 1, 2, 2), "text_embedding.0.weight": (m.dim, m.text_dim),
        "time_embedding.0.weight": (m.dim, FREQ_DIM), "time_projection.1.weight": (6 * m.dim, m.dim),
        "time_projection.1.bias": (6 * m.dim,), "head.head.weight": (4 * m.out_channels, m.dim),
        "head.head.bias": (4 * m.out_channels,), "head.modulation": (1, 2, m.dim),
    }  # fmt: skip
    per_block = {"ffn.0.weight": (m.ffn, m.dim), "ffn.0.bias": (m.ffn,), "ffn.2.weight": (m.dim, m.ffn),
                 "modulation": (1, 6, m.dim)}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {}
    for key in expected_names(m.layers, m.image_input):
        if key.startswith("img_emb."):
            continue
        default = (m.dim, m.dim) if key.endswith("weight") and ".norm" not in key else (m.dim,)
        leaf = key.split(".", 2)[2] if key.startswith("blocks.") else ""
        shapes[key] = special.get(key) or per_block.get(leaf) or default
    return shapes
