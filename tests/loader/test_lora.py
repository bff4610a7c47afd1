"""LoRA files of every style merge to the same weights; what does not fit the model is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fastar_pack.fastar_core.checkpoint import load_checkpoint
from fastar_pack.fastar_core.errors import CheckpointError
from loader.layouts import DIM, FFN, LAYERS, diffusers, native, prefixed, write

pytestmark = pytest.mark.cpu
BASE = native(1)
RANK = 4
MODULES = [f"{attn}_attn.{part}" for attn in ("self", "cross") for part in "qkvo"] + ["ffn.0", "ffn.2"]


def halves() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Module -> (A [r, in], B [out, r]) for every linear layer inside the blocks."""
    draw = torch.Generator().manual_seed(5)
    sizes = {"ffn.0": (DIM, FFN), "ffn.2": (FFN, DIM)}
    made = {}
    for i in range(LAYERS):
        for module in MODULES:
            inner, outer = sizes.get(module, (DIM, DIM))
            a, b = torch.randn(RANK, inner, generator=draw), torch.randn(outer, RANK, generator=draw)
            made[f"blocks.{i}.{module}"] = (a, b)
    return made


HALVES = halves()


def named(path: Callable[[str], str], a: str = "lora_A.weight", b: str = "lora_B.weight") -> dict[str, torch.Tensor]:
    out = {}
    for module, (first, second) in HALVES.items():
        out |= {f"{path(module)}.{a}": first, f"{path(module)}.{b}": second}
    return out


def diffusers_path(module: str) -> str:
    (key,) = diffusers({f"{module}.weight": torch.zeros(1)})
    return "transformer." + key.removesuffix(".weight")


def with_fsdp(module: str) -> str:
    block, number, rest = module.split(".", 2)
    return f"base_model.model.{block}.{number}._fsdp_wrapped_module.{rest}"


PEFT = named(lambda module: f"base_model.model.{module}")
ALPHA = {f"diffusion_model.{module}.alpha": torch.tensor(2.0) for module in HALVES}
# name -> (file content, factor on B A at strength 1)
STYLES: dict[str, tuple[Mapping[str, Any], float]] = {
    "peft": (PEFT, 1.0),
    "peft_nested": ({"generator_lora": PEFT, "step": 10}, 1.0),
    "peft_flat": (prefixed(PEFT, "generator_lora."), 1.0),
    "peft_default": (named(lambda m: f"base_model.model.{m}", "lora_A.default.weight", "lora_B.default.weight"), 1.0),
    "peft_fsdp": (named(with_fsdp), 1.0),
    "peft_model": (named(lambda m: f"base_model.model.model.{m}"), 1.0),
    "comfyui": (named(lambda m: f"diffusion_model.{m}"), 1.0),
    "comfyui_alpha": ({**named(lambda m: f"diffusion_model.{m}", "lora_down.weight", "lora_up.weight"), **ALPHA}, 0.5),
    "kohya": (named(lambda m: "lora_unet_" + m.replace(".", "_"), "lora_down.weight", "lora_up.weight"), 1.0),
    "diffusers": (named(diffusers_path), 1.0),
    "native": (named(lambda m: m), 1.0),
}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base.pt", {"generator": prefixed(BASE, "model.")})


def merged(base: Path, content: Mapping[str, Any], strength: float = 1.0) -> dict[str, torch.Tensor]:
    return load_checkpoint(base, False, write(base.parent / "lora.pt", content), strength).state_dict


def check(state: Mapping[str, torch.Tensor], scale: float) -> None:
    for key, value in BASE.items():
        first, second = HALVES.get(key.removesuffix(".weight"), (None, None))
        wanted = value if first is None or second is None else value + scale * second @ first
        torch.testing.assert_close(state[key], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("strength", [1.0, -0.5])
@pytest.mark.parametrize("style", STYLES)
def test_every_style_merges_to_the_same_weights(style: str, strength: float, base: Path) -> None:
    content, factor = STYLES[style]
    check(merged(base, content, strength), factor * strength)


@pytest.mark.parametrize("style", STYLES)
def test_a_lost_half_is_refused_in_every_style(style: str, base: Path) -> None:
    content = STYLES[style][0]
    inner = dict(content.get("generator_lora", content))
    lost = next(key for key in inner if "1" in key and ("lora_B" in key or "lora_up" in key))
    del inner[lost]
    with pytest.raises(CheckpointError, match="expected both halves of a LoRA"):
        merged(base, {"generator_lora": inner} if "generator_lora" in content else inner)


def test_strength_zero_leaves_the_weights_alone(base: Path) -> None:
    check(merged(base, PEFT, 0.0), 0.0)


def test_alpha_from_the_metadata(base: Path) -> None:
    path = base.parent / "lora.safetensors"
    save_file(PEFT, path, metadata={"lora_alpha": "8"})
    checkpoint = load_checkpoint(base, False, path)
    check(checkpoint.state_dict, 2.0)
    assert checkpoint.findings.found[-1] == (
        "LoRA lora.safetensors: 20 modules changed, rank 4, alpha 8 from the metadata, strength 1"
    )


def test_plain_differences_are_added(base: Path) -> None:
    change = {
        "diffusion_model.blocks.0.norm3.diff": torch.full((DIM,), 2.0),
        "diffusion_model.blocks.0.norm3.diff_b": torch.full((DIM,), 3.0),
    }
    state = merged(base, change, 0.5)
    assert torch.equal(state["blocks.0.norm3.weight"], BASE["blocks.0.norm3.weight"] + 1)
    assert torch.equal(state["blocks.0.norm3.bias"], BASE["blocks.0.norm3.bias"] + 1.5)


@pytest.mark.parametrize(("content", "words"), [
    ({**PEFT, "base_model.model.blocks.7.ffn.0.lora_A.weight": torch.ones(RANK, DIM)}, "1 of 41 entries fit no weight"),
    (named(lambda m: f"lora_te_{m}"), "40 of 40 entries fit no weight"),
    ({**PEFT, "base_model.model.blocks.0.ffn.0.lora_magnitude_vector": torch.ones(2)}, "DoRA"),
    ({**PEFT, "diffusion_model.blocks.0.ffn.0.lora_A.weight": torch.ones(RANK, DIM)}, "more than one LoRA"),
    ({key: value[..., :3] for key, value in PEFT.items()}, "made for a model of another size"),
    ({"diffusion_model.blocks.0.norm3.diff": torch.ones(3)}, "made for another model"),
    ({"epoch": 3}, "holds no LoRA weights"),
    (BASE, "69 of 69 entries fit no weight"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(content: Mapping[str, Any], words: str, base: Path) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        merged(base, content)
    assert "lora.pt" in str(caught.value)


def test_eight_bit_weights_are_not_merged_into(tmp_path: Path) -> None:
    state = {**BASE, "blocks.0.ffn.0.weight": BASE["blocks.0.ffn.0.weight"].to(torch.float8_e4m3fn)}
    path = write(tmp_path / "base.safetensors", state)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.ffn\.0\.weight is stored in 8 bits .* LoraLoaderModelOnly"):
        merged(path, PEFT)


def test_half_precision_is_merged_in_float32(tmp_path: Path) -> None:
    state = {key: value.bfloat16() for key, value in BASE.items()}
    result = merged(write(tmp_path / "base.safetensors", state), PEFT)
    for module, (first, second) in HALVES.items():
        exact = state[f"{module}.weight"].float() + second @ first
        assert torch.equal(result[f"{module}.weight"], exact.bfloat16())


def test_a_file_with_both_tells_that_the_lora_is_not_applied(tmp_path: Path) -> None:
    path = write(tmp_path / "both.pt", {"generator": prefixed(BASE, "model."), "generator_lora": PEFT})
    checkpoint = load_checkpoint(path, False)
    check(checkpoint.state_dict, 0.0)
    assert any("choose the same file as 'lora'" in text for text in checkpoint.findings.warnings)
    check(load_checkpoint(path, False, path).state_dict, 1.0)
