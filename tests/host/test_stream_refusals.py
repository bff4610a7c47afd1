"""Bad input ends before the first model call with a message that says what to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastar_pack.fastar_core.errors import FastARError
from host.stream_parts import HEIGHT, WIDTH, CountingCalls, sample, text, tiny_model, tiny_wan_vae
from tests_support import Host

pytestmark = pytest.mark.cpu


def latent(*shape: int) -> dict[str, torch.Tensor]:
    return {"samples": torch.zeros(shape)}


def with_entry(**extra: Any) -> list[Any]:
    rows = text(1)
    return [[rows[0][0], extra]]


ROWS, COLUMNS = HEIGHT // 8, WIDTH // 8
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "zero frames": ({"length": 0}, "length is 0 pixel frames, at least 1"),
    "width": ({"width": 50}, "width is 50 pixels, expected a multiple of 8; set width to 48"),
    "height": ({"height": 0}, "height is 0 pixels.*set height to 8"),
    "batch": ({"batch_size": 0}, "batch_size is 0"),
    "fps": ({"fps": 5000.0}, "fps is 5000"),
    "fps in memory": ({"fps": 0.0005, "frames_to": "memory"}, "fps is 0.0005"),
    "prefix": ({"filename_prefix": "../../x"}, "filename_prefix is '../../x'.*give a name inside it"),
    "preset": ({"preset": "nonsense"}, "no preset 'nonsense'; choose one of self_forcing"),
    "auto preset": ({"preset": "auto"}, "does not say which family.*choose preset"),
    "cache": ({"cache": "none"}, "cache is 'none', expected one of"),
    "window": ({"cache": "sink_window", "window": 5, "sink": 3}, "window of 5 .* sink of 3 .* raise window to 6"),
    "frames_to": ({"frames_to": "tape"}, "frames_to is 'tape', expected one of auto, memory, file"),
    "decode": ({"decode": "never"}, "decode is 'never'"),
    "cfg without negative": ({"cfg": 4.0}, "cfg is 4, .* connect negative or set cfg to 1"),
    "other text encoder": ({"positive": [[torch.zeros(1, 7, 2048), {}]]}, "width 2048, the model takes 64; .* umt5_xxl"),
    "other negative": ({"cfg": 2.0, "negative": [[torch.zeros(1, 7, 768), {}]]}, "negative conditioning .* width 768"),
    "empty prompt": ({"positive": []}, "holds no conditioning"),
    "late prompts": ({"prompts": [(3, text(1))]}, "the first 0"),
    "unlike prompts": ({"prompts": [(0, text(1)), (3, text(1) + text(2))]}, "2 conditioning entries, .* prompt has 1"),
    "4-D start latent": ({"start_latent": latent(1, 16, ROWS, COLUMNS)}, "start_latent has shape .* 5 dimensions"),
    "start channels": ({"start_latent": latent(1, 48, 1, ROWS, COLUMNS)}, "48 channels, expected 16"),
    "start size": ({"start_latent": latent(1, 16, 1, 6, 8)}, "set width to 64 and height to 48"),
    "start empty": ({"start_latent": latent(1, 16, 0, ROWS, COLUMNS)}, "holds no frame"),
    "start too long": ({"start_latent": latent(1, 16, 6, ROWS, COLUMNS)}, "nothing to generate; raise length above 21"),
    "start rows": ({"start_latent": latent(3, 16, 1, ROWS, COLUMNS), "batch_size": 2}, "3 rows, batch_size is 2"),
    "two starts": ({"start_latent": latent(1, 16, 1, ROWS, COLUMNS), "start_image": torch.zeros(1, 8, 8, 3)},
                   "disconnect one"),
    "start images": ({"start_image": torch.zeros(3, 8, 8, 3)}, "give 1 or 5"),
    "area": ({"positive": with_entry(area=(4, 6, 0, 0))}, "positive conditioning has an area"),
    "mask": ({"positive": with_entry(mask=torch.ones(1, 4, 6))}, "positive conditioning has a mask"),
    "range": ({"positive": with_entry(start_percent=0.2, end_percent=1.0)}, "has a timestep range"),
    "later prompt": ({"prompts": [(0, text(1)), (3, with_entry(start_percent=0.5))]}, "has a timestep range"),
    "negative": ({"cfg": 2.0, "negative": with_entry(start_percent=0.5)}, "negative conditioning has a timestep range"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_the_first_call(name: str, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, message = REFUSED[name]
    calls = CountingCalls(monkeypatch)
    files = set((host.base / "output").rglob("*"))
    with pytest.raises(FastARError, match=message):
        sample(host, tiny_model(), tiny_wan_vae(), **{"frames_to": "file", **changes})
    assert calls.batches == []
    assert {path for path in (host.base / "output").rglob("*") if path.is_file()} - files == set()


def test_hooks_are_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    import comfy.hooks

    calls = CountingCalls(monkeypatch)
    hooks = comfy.hooks.HookGroup()
    hooks.add(comfy.hooks.TransformerOptionsHook({}))
    with pytest.raises(FastARError, match="positive conditioning has hooks"):
        sample(host, tiny_model(), tiny_wan_vae(), positive=with_entry(hooks=hooks))
    assert calls.batches == []


def test_a_foreign_vae_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CountingCalls(monkeypatch)
    vae = tiny_wan_vae()
    for attribute, value in (("latent_channels", 48), ("latent_dim", 2), ("first_stage_model", None)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(vae, attribute, value)
            with pytest.raises(FastARError, match="VAE"):
                sample(host, tiny_model(), vae)
    assert calls.batches == []


def test_a_foreign_model_is_refused(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    model, vae = tiny_model(), tiny_wan_vae()
    calls = CountingCalls(monkeypatch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model.diffusion_model, "model_type", "i2v")
        with pytest.raises(FastARError, match="type i2v"):
            sample(host, model, vae)
    other = type("FluxLike", (torch.nn.Module,), {})()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model.model, "diffusion_model", other)
        with pytest.raises(FastARError, match="the model is a FluxLike"):
            sample(host, model, vae)
    assert calls.batches == []


def test_the_preset_of_the_model_is_used_and_a_different_one_noted(host: Host) -> None:
    import json

    from fastar_pack.fastar_core.presets import get_preset
    from fastar_pack.fastar_core.settings import FastARSettings

    model = tiny_model()
    model.model_options["transformer_options"]["fastar"] = FastARSettings(get_preset("causal_forcing_framewise_4step"))
    own = sample(host, model, tiny_wan_vae(), preset="auto", length=5)
    settings = json.loads(own[3])["settings"]
    assert (settings["preset"], settings["block"]) == ("causal_forcing_framewise_4step", 1)
    other = json.loads(sample(host, model, tiny_wan_vae(), preset="self_forcing", length=5)[3])
    assert "the model was loaded as 'causal_forcing_framewise_4step'" in other["warnings"][0]
