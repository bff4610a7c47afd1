"""AnnCA in streaming runs on the host's own model: exact for padding, counted, and gone when it is off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.engine_tools import HEADS, TEXT
from fastar_pack.fastar_core.annca import AnnCASettings
from fastar_pack.fastar_core.noise import seeded_normal
from host.host_tools import NOISE, prompt, stream, tiny_model, with_option
from tests_support import Host
from tiny.wan_plain import dense_attention

pytestmark = pytest.mark.cpu
EXACT = 1e-5


def padded(seed: int, words: int, rows: int, front: int = 0) -> Tensor:
    """[1, rows, TEXT]: ``words`` distinct rows after ``front`` zero rows, zeros elsewhere."""
    text = torch.zeros(1, rows, TEXT)
    text[:, front:front + words] = prompt(seed, rows=words)
    return text


@pytest.fixture(scope="module")
def model(host: Host) -> Any:
    return tiny_model()


@pytest.mark.parametrize("words", [0, 1, 9, 64])
def test_the_pad_merge_is_exact_for_any_number_of_words(model: Any, words: int) -> None:
    noise, report = seeded_normal(1, NOISE), {}
    text = padded(3, words, 64, front=min(2, 64 - words))
    plain = stream(model, noise, text)
    merged = stream(model, noise, text, annca=AnnCASettings(), report=report)
    assert (merged - plain).abs().max() <= EXACT
    calls = 2 * (report["model_calls"]["denoise"] + report["model_calls"]["clean"])
    if words == 64:
        assert torch.equal(merged, plain)
        assert report["annca"]["calls"] == {"left alone: no equal rows": calls}
    else:
        assert report["annca"]["calls"] == {"merged": calls}
        assert report["annca"]["prompts"] == [{"rows": 64, "distinct": words + 1}]


def test_unequal_prompts_of_a_batch_and_both_guidance_branches(model: Any) -> None:
    noise = seeded_normal(1, (2, *NOISE[1:]))
    positive = torch.cat([padded(3, 9, 40), padded(5, 30, 40, front=4)])
    negative = padded(4, 1, 40).expand(2, -1, -1)
    plain = stream(model, noise, positive, negative, cfg=3.0)
    merged = stream(model, noise, positive, negative, cfg=3.0, annca=AnnCASettings())
    assert (merged - plain).abs().max() <= 3 * EXACT


def test_a_merge_without_its_count_would_be_seen(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastar_pack.fastar_core.annca import pruner, row_groups

    noise, text = seeded_normal(1, NOISE), padded(3, 9, 64)

    def no_count(context: Tensor) -> row_groups.RowGroups:
        groups = row_groups.find_groups(context)
        return row_groups.RowGroups(groups.index, torch.zeros_like(groups.log_count), groups.padding, groups.twin, groups.rows)

    plain = stream(model, noise, text)
    monkeypatch.setattr(pruner, "find_groups", no_count)
    assert (stream(model, noise, text, annca=AnnCASettings()) - plain).abs().max() > 1e-3


def test_the_keep_rule_runs_per_frame_in_its_window_and_never_in_clean_passes(model: Any) -> None:
    noise, report = seeded_normal(1, NOISE), {}
    text = padded(3, 20, 64)
    plain = stream(model, noise, text)
    out = stream(model, noise, text, annca=AnnCASettings(keep="quant", start=0.5), report=report)
    calls = report["model_calls"]
    assert report["annca"]["calls"] == {"kept by frame": calls["denoise"], "merged": calls["denoise"] + 2 * calls["clean"]}
    assert 0.2 <= report["annca"]["kept_share"] < 1
    assert 1e-5 < (out - plain).abs().max() < 0.5
    everything = stream(model, noise, text, annca=AnnCASettings(keep="quant", probes=64))
    assert (everything - plain).abs().max() <= EXACT, "keeping every token is dense attention"


def test_dense_calls_still_reach_another_override(model: Any) -> None:
    keys: list[int] = []

    def theirs(func: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, *args: Any, **kwargs: Any) -> Tensor:
        keys.append(k.shape[1])
        return func(q, k, v, heads, *args, **kwargs)

    stream(with_option(model, optimized_attention_override=theirs), seeded_normal(1, NOISE), padded(3, 9, 40), annca=AnnCASettings())
    assert keys
    assert 40 not in keys, "the text attention was merged, so it was ours"
    full = prompt(3, rows=40)
    stream(with_option(model, optimized_attention_override=theirs), seeded_normal(1, NOISE), full, annca=AnnCASettings())
    assert 40 in keys, "nothing to merge: the other pack keeps the call"


def test_a_second_text_attention_of_a_block_is_left_alone(model: Any) -> None:
    """Guidance nodes attend to a prompt of their own, as long as the first, in the same block."""
    from comfy.ldm.modules.attention import optimized_attention

    far: list[float] = []

    def block(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        out = extra["original_block"](args)
        x = out["img"]
        k, v = (seeded_normal(seed, (x.shape[0], 64, x.shape[2])) for seed in (1, 2))
        got = optimized_attention(x, k, v, heads=HEADS, transformer_options=args["transformer_options"])
        qh, kh, vh = (t.unflatten(-1, (HEADS, -1)) for t in (x, k, v))
        far.append(float((got - dense_attention(0, qh, kh, vh).flatten(2)).abs().max()))
        return out

    patched = with_option(model, patches_replace={"dit": {("double_block", 0): block}})
    report: dict[str, Any] = {}
    stream(patched, seeded_normal(1, NOISE), padded(3, 9, 64), annca=AnnCASettings(), report=report)
    assert far
    assert max(far) <= EXACT
    assert set(report["annca"]["calls"]) == {"merged"}
