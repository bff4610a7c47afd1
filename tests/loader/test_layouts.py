"""Every published layout yields the same complete state dict; what is missing, surplus or misshapen is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fastar_pack.fastar_core.checkpoint import Checkpoint, load_checkpoint
from fastar_pack.fastar_core.errors import CheckpointError
from loader.layouts import DIM, FFN, LAYERS, LAYOUTS, TEXT, diffusers, fsdp, native, prefixed, write

pytestmark = pytest.mark.cpu
WANTED, OTHER = native(1), native(2)


def load(tmp_path: Path, content: Mapping[str, Any], suffix: str = ".pt", use_ema: bool = True) -> Checkpoint:
    return load_checkpoint(write(tmp_path / f"model{suffix}", content), use_ema)


def assert_same(state: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    assert set(state) == set(wanted)
    for key, value in wanted.items():
        assert torch.equal(state[key], value), key


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_yields_the_same_tensors(layout: str, tmp_path: Path) -> None:
    suffix, content = LAYOUTS[layout]
    checkpoint = load(tmp_path, content(WANTED, OTHER), suffix)
    assert_same(checkpoint.state_dict, WANTED)
    shape = checkpoint.shape
    assert (shape.dim, shape.layers, shape.heads, shape.ffn) == (DIM, LAYERS, 1, FFN)
    assert (shape.in_channels, shape.out_channels, shape.text_dim, shape.image_input) == (16, 16, TEXT, False)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lost", ["blocks.1.cross_attn.norm_k.weight", "head.modulation", "blocks.0.norm3.bias"])
def test_a_missing_weight_is_named_in_every_layout(layout: str, lost: str, tmp_path: Path) -> None:
    suffix, content = LAYOUTS[layout]
    damaged = {key: value for key, value in WANTED.items() if key != lost}
    with pytest.raises(CheckpointError, match=f"1 of 69 weights are missing: {lost.replace('.', '[.]')}"):
        load(tmp_path, content(damaged, OTHER), suffix)


@pytest.mark.parametrize("use_ema", [True, False])
def test_the_preset_chooses_between_averaged_and_plain_weights(use_ema: bool, tmp_path: Path) -> None:
    content = {"generator": prefixed(OTHER, "model."), "generator_ema": fsdp(WANTED)}
    checkpoint = load(tmp_path, content, use_ema=use_ema)
    assert_same(checkpoint.state_dict, WANTED if use_ema else OTHER)
    assert not checkpoint.findings.warnings
    assert checkpoint.findings.ignored[f"entry '{'generator' if use_ema else 'generator_ema'}'"] == 69


@pytest.mark.parametrize(("present", "wanted"), [("generator", "generator_ema"), ("generator_ema", "generator")])
def test_the_other_entry_is_taken_with_a_warning(present: str, wanted: str, tmp_path: Path) -> None:
    checkpoint = load(tmp_path, {present: prefixed(WANTED, "model.")}, use_ema=wanted == "generator_ema")
    assert_same(checkpoint.state_dict, WANTED)
    (warning,) = checkpoint.findings.warnings
    assert f"expects the entry '{wanted}'" in warning
    assert f"only '{present}'" in warning


def test_ignored_entries_are_reported_by_group(tmp_path: Path) -> None:
    checkpoint = load(tmp_path, LAYOUTS["causvid"][1](WANTED, OTHER), use_ema=False)
    assert checkpoint.findings.ignored == {"entry 'optimizer'": 2, "discriminator or critic": 3, "rope tables": 1}
    assert "ignored: 3 in discriminator or critic" in checkpoint.lines()
    full = load(tmp_path, LAYOUTS["full_checkpoint"][1](WANTED, OTHER), ".safetensors")
    assert full.findings.ignored == {"outside of 'model.diffusion_model.'": 2}


def test_unknown_entries_outside_of_the_network_are_left_out_with_a_warning(tmp_path: Path) -> None:
    checkpoint = load(tmp_path, {**WANTED, "training_step": torch.tensor(3)})
    assert_same(checkpoint.state_dict, WANTED)
    assert checkpoint.findings.warnings == ["1 unknown entries were left out: training_step"]


def test_a_prefix_that_not_every_name_has_is_never_stripped(tmp_path: Path) -> None:
    content = prefixed(WANTED, "model.")
    content["head.modulation"] = content.pop("model.head.modulation")
    with pytest.raises(CheckpointError, match=r"68 names begin with 'model\.' and 1 do not \(head\.modulation\)"):
        load(tmp_path, content)


def test_two_models_in_one_file_are_refused(tmp_path: Path) -> None:
    content = {**fsdp(WANTED), **prefixed(OTHER, "model.")}
    with pytest.raises(CheckpointError, match="mixes two models"):
        load(tmp_path, content)


def test_diffusers_norms_change_places(tmp_path: Path) -> None:
    """A loader that keeps the numbers of the norms would find none of native norm3; the wrong names are refused."""
    content = diffusers(WANTED)
    assert "blocks.0.norm2.weight" in content
    assert "blocks.0.norm3.weight" not in content
    wrong = {key.replace("norm2", "norm3"): value for key, value in content.items()}
    with pytest.raises(CheckpointError, match=r"4 of 69 weights are missing: blocks\.0\.norm3\.weight"):
        load(tmp_path, wrong)


def test_missing_layers_and_shards_are_explained(tmp_path: Path) -> None:
    state = {key.replace("blocks.1.", "blocks.2."): value for key, value in WANTED.items()}
    with pytest.raises(CheckpointError, match="layer 1 of 3 is missing altogether"):
        load(tmp_path, state)
    path = write(tmp_path / "model-00001-of-00002.safetensors", {k: v for k, v in WANTED.items() if "text_" not in k})
    with pytest.raises(CheckpointError, match=r"4 of 69 weights .* one part of several; join the parts"):
        load_checkpoint(path, True)


@pytest.mark.parametrize("key", [
    "blocks.1.ffn.2.weight", "blocks.0.self_attn.q.weight", "patch_embedding.weight", "time_projection.1.bias",
    "blocks.1.modulation", "blocks.0.cross_attn.norm_q.weight",
])  # fmt: skip
def test_shapes_that_do_not_fit_are_named(key: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"1 weights do not fit a model of width 128: {key.replace('.', '[.]')}"):
        load(tmp_path, {**WANTED, key: WANTED[key][:-1].clone()})


@pytest.mark.parametrize("key", ["patch_embedding.weight", "text_embedding.0.weight", "head.modulation"])
def test_flattened_weights_are_refused_in_words(key: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=key):
        load(tmp_path, {**WANTED, key: torch.tensor(1.0)})


@pytest.mark.parametrize(("key", "words"), [
    ("vace_blocks.0.before_proj.weight", "VACE control variant"),
    ("blocks.0.action_model.t_qkv.weight", "Matrix-Game action variant"),
    ("control_adapter.conv.weight", "camera control variant"),
    ("fps_embedding.weight", "SkyReels variant"),
    ("face_adapter.fuser_blocks.0.k_norm.weight", "character animation variant"),
    ("blocks.0.new_module.weight", "weights belong to no known layer: blocks.0.new_module.weight"),
])  # fmt: skip
def test_variants_of_wan_are_refused(key: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path, {**WANTED, key: torch.ones(2)})


@pytest.mark.parametrize(("keys", "words"), [
    (["model.diffusion_model.input_blocks.0.0.weight", "first_stage_model.x"], "Stable Diffusion image model"),
    (["double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight"], "an image or Hunyuan model"),
    (["decoder.conv1.weight", "encoder.downsamples.0.residual.0.gamma"], "a VAE"),
    (["shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"], "a text encoder"),
    (["diffusion_model.blocks.0.self_attn.q.lora_A.weight"], "a LoRA; choose it as 'lora'"),
    (["videodit_blocks.layers.0.mlp.weight"], "a MAGI-1 model"),
    (["some.weight"], "no video model of the Wan layout"),
])  # fmt: skip
def test_other_families_are_told_by_name(keys: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        load(tmp_path, {key: torch.ones(2) for key in keys}, ".safetensors")
    assert "choose" in str(caught.value)


def test_a_file_with_nothing_but_a_lora_entry_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="looks like a LoRA"):
        load(tmp_path, {"generator_lora": {"base_model.model.blocks.0.ffn.0.lora_A.weight": torch.ones(2, 2)}})


def test_image_layout_is_read_with_its_extra_weights(tmp_path: Path) -> None:
    state = dict(WANTED)
    for i in range(LAYERS):
        for leaf, shape in (("weight", (DIM, DIM)), ("bias", (DIM,))):
            state |= {f"blocks.{i}.cross_attn.{part}.{leaf}": torch.ones(shape) for part in ("k_img", "v_img")}
        state[f"blocks.{i}.cross_attn.norm_k_img.weight"] = torch.ones(DIM)
    state |= {f"img_emb.proj.{i}.{leaf}": torch.ones(4) for i in (0, 1, 3, 4) for leaf in ("weight", "bias")}
    checkpoint = load(tmp_path, state)
    assert checkpoint.shape.image_input
    assert len(checkpoint.state_dict) == 69 + 8 + 5 * LAYERS
    with pytest.raises(CheckpointError, match=r"1 of 87 weights are missing: blocks\.1\.cross_attn\.norm_k_img"):
        load(tmp_path, {k: v for k, v in state.items() if k != "blocks.1.cross_attn.norm_k_img.weight"})


def test_heads_come_from_metadata_or_from_128_per_head(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", WANTED, {"num_heads": 4, "dim": 7})
    checkpoint = load_checkpoint(path, True)
    assert checkpoint.shape.heads == 4
    told = checkpoint.host_metadata()["config"]
    assert '"num_heads": 4' in told
    assert '"text_dim": 24' in told
    assert '"dim"' not in told
    with pytest.raises(CheckpointError, match="width 128 with 3 heads is not usable"):
        load_checkpoint(write(tmp_path / "n.safetensors", WANTED, {"num_heads": 3}), True)
    with pytest.raises(CheckpointError, match="width 96 with 0 heads"):
        load_checkpoint(write(tmp_path / "o.safetensors", native(1, dim=96)), True)


def test_scales_of_quantised_files_travel_with_their_weights(tmp_path: Path) -> None:
    scale = {"blocks.0.ffn.0.scale_weight": torch.tensor(2.0), "scaled_fp8": torch.zeros(0)}
    checkpoint = load(tmp_path, prefixed({**WANTED, **scale}, "model."), ".safetensors")
    assert_same(checkpoint.state_dict, {**WANTED, **scale})
