"""The loader node inside a real host: the plain forward from every kind of file, with settings and shift set."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fastar_pack.fastar_core.errors import CheckpointError, ConfigError
from fastar_pack.fastar_core.settings import FastARSettings
from loader.layouts import LAYOUTS, TEXT, native, prefixed, write
from loader.test_lora import PEFT, check
from tests_support import Host
from tiny.host_models import build_host_model
from tiny.wan_plain import dense_attention, grid_positions, rope_rotate, wan_forward

pytestmark = pytest.mark.cpu
WEIGHTS, OTHER = native(1), native(2)
STOCK = native(3, text=4096)  # sizes that every host tells from shapes
TOLERANCE = 2e-5
Load = Callable[..., tuple[Any, str]]


@pytest.fixture
def load(host: Host) -> Iterator[Load]:
    """Writes a file into the host's models folder and loads it through the node; the files go afterwards."""
    written: list[Path] = []

    def run(name: str, content: Mapping[str, Any], metadata: Mapping[str, Any] | None = None, **inputs: Any) -> Any:
        path = place(host, "diffusion_models", name, content, metadata)
        written.append(path)
        node = host.nodes["FastARLoadModel"]()
        with torch.no_grad():
            return node.load(name, **{"preset": "auto", "weight_dtype": "default", **inputs})

    yield run
    for path in written:
        path.unlink(missing_ok=True)


def place(
    host: Host, kind: str, name: str, content: Mapping[str, Any], metadata: Mapping[str, Any] | None = None
) -> Path:
    folder = host.base / "models" / kind
    folder.mkdir(parents=True, exist_ok=True)
    return write(folder / name, content, metadata)


@torch.no_grad()
def forward(model: Any, text: int) -> torch.Tensor:
    x, context = inputs(text)
    inner = model.get_model_object("diffusion_model")
    return inner(x, torch.tensor([937.5]), context)


def inputs(text: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(9)
    return torch.randn(1, 16, 2, 4, 6, generator=draw), torch.randn(1, 7, text, generator=draw)


@torch.no_grad()
def plain(weights: Mapping[str, torch.Tensor], heads: int) -> torch.Tensor:
    """The same forward without any host."""
    x, context = inputs(weights["text_embedding.0.weight"].shape[1])
    places = grid_positions(2, 2, 3)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return dense_attention(layer, rope_rotate(q, places), rope_rotate(k, places), v)

    times = torch.full((1, 2), 937.5)
    return wan_forward(weights, x, times, context, num_heads=heads, attend=attend)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("layout", ["self_forcing", "rolling_forcing_fsdp", "krea", "diffusers", "flat_generators"])
def test_published_layouts_give_the_plain_forward(layout: str, load: Load) -> None:
    suffix, content = LAYOUTS[layout]
    model, _ = load(f"{layout}{suffix}", content(STOCK, OTHER), preset="self_forcing")
    assert distance(forward(model, 4096), plain(STOCK, 1)) < TOLERANCE
    assert distance(forward(model, 4096), plain({**STOCK, "blocks.1.norm3.bias": torch.ones(128)}, 1)) > 100 * TOLERANCE


def test_sizes_that_a_host_cannot_tell_are_honoured(load: Load) -> None:
    """Text width comes from the weights, the number of heads from the metadata, also where the host reads neither."""
    model, _ = load("self_forcing_heads.safetensors", WEIGHTS, {"num_heads": 4})
    assert distance(forward(model, TEXT), plain(WEIGHTS, 4)) < TOLERANCE
    assert distance(forward(model, TEXT), plain(WEIGHTS, 1)) > 100 * TOLERANCE
    model, _ = load("self_forcing_text.pt", {"generator_ema": prefixed(WEIGHTS, "model.")})
    assert distance(forward(model, TEXT), plain(WEIGHTS, 1)) < TOLERANCE


def test_the_explicit_builder_of_the_tests_gives_the_same(load: Load) -> None:
    model, _ = load("self_forcing_heads.safetensors", WEIGHTS, {"num_heads": 4})
    built = build_host_model(WEIGHTS, num_heads=4, text_dim=TEXT, shift=5.0)
    assert torch.equal(forward(model, TEXT), forward(built, TEXT))
    assert built.get_model_object("model_sampling").shift == 5.0


def test_shift_and_settings_are_on_the_model_and_survive_clones(load: Load) -> None:
    model, report = load("self_forcing.safetensors", STOCK)
    sampling = model.get_model_object("model_sampling")
    assert sampling.shift == 5.0
    assert float(sampling.sigma(torch.tensor(750.0))) == pytest.approx(0.9375, abs=1e-6)
    settings = model.model_options["transformer_options"]["fastar"]
    assert isinstance(settings, FastARSettings)
    assert settings.preset is not None
    assert settings.preset.key == "self_forcing"
    assert model.clone().model_options["transformer_options"]["fastar"] is settings
    assert copy.deepcopy(settings) is settings
    for words in ("text-to-video layout, 2 layers, width 128, 1 heads", "preset: self_forcing", "flow shift 5",
                  "warning: the model's width is 128"):  # fmt: skip
        assert words in report


def test_the_chosen_preset_decides_which_weights_are_taken(load: Load) -> None:
    content = {"generator": prefixed(OTHER, "model."), "generator_ema": prefixed(WEIGHTS, "model.")}
    for preset, wanted in (("causal_forcing_chunkwise", OTHER), ("causal_forcing_framewise_4step", WEIGHTS)):
        model, report = load("weights.pt", content, preset=preset)
        assert torch.equal(model.model.diffusion_model.head.modulation.float(), wanted["head.modulation"])
        assert f"preset: {preset}" in report


def test_lora_is_merged_while_loading(load: Load, host: Host) -> None:
    lora = place(host, "loras", "lora.pt", {"generator_lora": PEFT})
    base = native(1)
    model, report = load("self_forcing.safetensors", base, lora="lora.pt", lora_strength=0.5)
    state = {key: value.float() for key, value in model.model.diffusion_model.state_dict().items()}
    check(state, 0.5)
    assert "LoRA lora.pt: 20 modules changed, rank 4, strength 0.5" in report
    lora.unlink()


def test_fp8_weights_are_kept_in_fp8(load: Load) -> None:
    model, _ = load("self_forcing.safetensors", STOCK, weight_dtype="fp8_e4m3fn")
    assert model.model.diffusion_model.blocks[0].ffn[0].weight.dtype == torch.float8_e4m3fn
    assert model.model.get_dtype() == torch.float8_e4m3fn


def test_refusals_reach_the_user_in_words(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"my_model\.pt say which family it is; choose preset"):
        load("my_model.pt", STOCK)
    with pytest.raises(CheckpointError, match="looks like a Stable Diffusion image model"):
        load("self_forcing.safetensors", {"model.diffusion_model.input_blocks.0.0.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"1 of 69 weights are missing: head\.modulation"):
        load("self_forcing.pt", {key: value for key, value in STOCK.items() if key != "head.modulation"})


def test_the_lists_of_the_node_show_both_kinds_of_files(load: Load, host: Host) -> None:
    load("self_forcing_list.pt", STOCK)
    load("self_forcing_list.safetensors", STOCK)
    spec = host.nodes["FastARLoadModel"].INPUT_TYPES()
    files = spec["required"]["model_name"][0]
    assert {"self_forcing_list.pt", "self_forcing_list.safetensors"} <= set(files)
    assert spec["required"]["preset"][0][0] == "auto"
    assert spec["optional"]["lora"][0][0] == "none"


def test_a_newer_host_can_load_the_weights_again(load: Load) -> None:
    model, _ = load("self_forcing.pt", {"generator_ema": prefixed(STOCK, "model.")})
    again = getattr(model, "cached_patcher_init", None)
    if again is None:
        assert not hasattr(model, "cached_patcher_init"), "this host asks for a way to load again, and there is none"
        return
    second = again[0](*again[1], disable_dynamic=True)
    assert second.model is not model.model
    assert torch.equal(forward(second, 4096), forward(model, 4096))
    assert type(model.model.diffusion_model).__name__ == "CausalWanModel"
