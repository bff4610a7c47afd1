"""Prompt switches on a real host: golden run A5 through the guider that changes prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastar_pack.fastar_core.policies import PolicySettings
from host.host_tools import build
from tests_support import Host
from tiny.golden import RUN_TOLERANCE, Golden, load_golden
from tiny.wan_plain import embed_text

pytestmark = pytest.mark.cpu
WINDOW = PolicySettings("sink_window", 12, 3)


def switched(golden: Golden, settings: PolicySettings, **changes: Any) -> tuple[Tensor, dict[str, Any]]:
    from fastar_pack.nodes.host.guider import StreamGuider
    from fastar_pack.nodes.host.sampling import StreamRequest, make_stream_sampler

    patcher = build(golden.weights, golden.meta["heads"], golden.meta["text_dim"])
    texts = [[[golden.tensors[key], {}]] for key in sorted(golden.tensors) if key.startswith("text.")]
    starts = [0, *golden.meta["switch_frames"]]
    guider = StreamGuider(patcher, list(zip(starts, texts)))
    report: dict[str, Any] = {}
    told: list[Any] = []

    def on_call(prompt_id: Any) -> None:
        told.append(prompt_id)
        guider.use(prompt_id)

    request = StreamRequest(settings, golden.schedule, golden.meta["block"], 0, renoise=golden.renoise, prompt_at=guider.prompt_at,
                            clean_last=True, recache_frames=12, on_call=on_call, report=report)
    for name, value in changes.items():
        setattr(request, name, value)
    with torch.no_grad():
        out = guider.sample(golden.tensors["noise"].clone(), torch.zeros_like(golden.tensors["noise"]),
                            make_stream_sampler(request), torch.tensor([1.0, 0.0]), seed=0)
    report["prompts"] = [starts.index(prompt) for prompt in told]
    return patcher.model.process_latent_in(out), report


def test_golden_prompt_switch_through_the_guider(host: Host) -> None:
    golden = load_golden("A5")
    out, report = switched(golden, WINDOW)
    assert (out - golden.tensors["out"]).abs().max() < RUN_TOLERANCE
    assert report["prompts"] == [call["prompt"] for call in golden.calls]
    assert report["model_calls"]["recache"] == 2


@pytest.mark.parametrize(("settings", "changes"), [
    (replace(WINDOW, recache="drop"), {}), (WINDOW, {"recache_frames": None}), (WINDOW, {"prompt_at": lambda frame: 0}),
    (replace(WINDOW, positions="slot"), {}), (WINDOW, {"rebuild": True}),
])
def test_wrong_switches_are_far_from_golden(settings: PolicySettings, changes: dict[str, Any], host: Host) -> None:
    golden = load_golden("A5")
    out, _ = switched(golden, settings, **changes)
    assert (out - golden.tensors["out"]).abs().max() > 0.1


class Same:
    """Acts as ``watch`` and compares equal to ``ours``: the hook checks that nobody replaced it."""

    def __init__(self, function: Any, twin: Any) -> None:
        self.function, self.twin = function, twin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return bool(other == self.twin)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]


def test_every_layer_reads_the_current_prompt(host: Host) -> None:
    """Keys of the host's cross-attention, seen by an override that was there before us, are those of the call's prompt."""
    from fastar_pack.nodes.host import guider as guider_module

    golden = load_golden("A5")
    texts = [golden.tensors[key] for key in sorted(golden.tensors) if key.startswith("text.")]
    seen: list[Tensor] = []
    want = [cross_keys(golden, row) for row in texts]
    plain = guider_module.StreamGuider.predict_noise

    def predict(self: Any, x: Any, timestep: Any, model_options: Any = None, seed: Any = None) -> Any:
        options = model_options["transformer_options"]
        ours = options["optimized_attention_override"]

        def watch(func: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any) -> Tensor:
            if k.shape[1] == texts[0].shape[1]:
                seen.append(k.detach().clone())
            return ours(func, q, k, v, heads, *args, **kwargs)

        ours_only = {**options, "optimized_attention_override": Same(watch, ours)}
        return plain(self, x, timestep, {**model_options, "transformer_options": ours_only}, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guider_module.StreamGuider, "predict_noise", predict)
        switched(golden, WINDOW)
    layers = len(want[0])
    assert len(seen) == layers * len(golden.calls)
    for i, keys in enumerate(seen):
        prompt = golden.calls[i // layers]["prompt"]
        assert (keys - want[prompt][i % layers]).abs().max() < 1e-4, f"call {i // layers}, layer {i % layers}"
    assert all((a - b).abs().max() > 1e-2 for a, b in zip(want[0], want[1]))


def cross_keys(golden: Golden, rows: Tensor) -> list[Tensor]:
    """Keys of every layer's cross-attention for these prompt rows, from the weights alone."""
    text_rows, found = embed_text(golden.weights, rows), []
    for layer in range(golden.meta["layers"]):
        name = f"blocks.{layer}.cross_attn"
        key = torch.nn.functional.linear(text_rows, golden.weights[name + ".k.weight"], golden.weights[name + ".k.bias"])
        found.append(torch.nn.functional.rms_norm(key, key.shape[-1:], golden.weights[name + ".norm_k.weight"], 1e-6))
    return found
