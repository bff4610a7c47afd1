"""What merging loses and what not: the lemma, static videos, and every output recomputed from the members of each group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from core.tempcache_tools import Followed, Synthetic, similar_frames, tc
from fastar_pack.fastar_core.noise import seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.tempcache.store import LayerStore

pytestmark = pytest.mark.cpu
FRAMES, STATIC_TOKENS = 45, 6
TRUE, OFF = 1e-5, 1e-3


def static(phase: str, frame: int, layer: int) -> Tensor:
    """Every frame has the same keys; values and queries differ, as values may: they are averaged."""
    keys = seeded_normal(layer, (1, 1, STATIC_TOKENS, 2, 24))
    rest = seeded_normal(100 + 10 * frame + layer, (2, 1, STATIC_TOKENS, 2, 24))
    return torch.stack([rest[0], keys[0], rest[1]])


def without_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = LayerStore.refresh

    def refresh(self: LayerStore, *args: Any) -> None:
        plain(self, *args)
        self.bias = self.bias.clamp_max(0)

    monkeypatch.setattr(LayerStore, "refresh", refresh)


def far_from(settings: PolicySettings, scale_t: float) -> tuple[float, Synthetic]:
    """Largest difference of any output of a static video from those of a cache that keeps everything."""
    merged = Synthetic(settings, FRAMES, make=static, scale_t=scale_t).go(FRAMES)
    full = Synthetic(PolicySettings(), FRAMES, make=static, scale_t=scale_t).go(FRAMES)
    return max(float((a - b).abs().max()) for a, b in zip(merged.outputs, full.outputs)), merged


@pytest.mark.parametrize("space", ["post", "pre"])
@pytest.mark.parametrize("representative", ["mean", "last", "medoid"])
def test_a_static_video_at_one_position_loses_nothing(space: str, representative: str) -> None:
    error, merged = far_from(tc(budget_frames=6, space=space, representative=representative), scale_t=0)
    assert error <= TRUE
    assert int(merged.pool().count.sum()) == (FRAMES - 4) * STATIC_TOKENS
    assert int((merged.pool().count > 0).sum()) == STATIC_TOKENS, "one group per place"
    assert min(min(b["step_recall"]) for b in merged.blocks()) >= 1 - 1e-5


def test_without_the_log_count_the_same_video_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    without_bias(monkeypatch)
    assert far_from(tc(budget_frames=6), scale_t=0)[0] > 100 * OFF


@pytest.mark.parametrize("settings", [tc(budget_frames=6), tc(budget_frames=6, space="pre", representative="last")])
def test_a_static_video_at_running_positions_does_lose_and_the_report_says_so(settings: PolicySettings) -> None:
    error, merged = far_from(settings, scale_t=1)
    assert error > OFF
    told = [value for block in merged.blocks()[3:] for value in block["step_recall"]]
    assert max(told) < 1 - OFF


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("space", "representative"), [("post", "mean"), ("post", "last"), ("pre", "mean"), ("pre", "last")])
def test_outputs_follow_from_the_members_of_each_group(space: str, representative: str, shared: bool) -> None:
    settings = tc(budget_frames=7, space=space, representative=representative, threshold=0.8, floor=0.5, shared=shared, bias_correction=0)
    run = Followed(settings, batch=2).go(42)
    assert run.evictions
    assert max(len(m) for m in run.members.values()) >= 3, "groups have formed"
    for layer in range(run.layers):
        wanted = run.expected(42, 3, layer)
        got = run.call("denoise", 42, 3)[layer]
        assert (got - wanted).abs().max() <= TRUE
        assert (got - run.expected(42, 3, layer, bias=False)).abs().max() > OFF


def test_outputs_are_right_for_keys_with_a_huge_common_offset() -> None:
    """Keys around 100 in every channel: cosines are all near 1, so nearly everything merges, and still nothing is off."""
    plain = similar_frames(1, 6, 2, 24)
    factor, offset = torch.tensor([[0.1, 1.0, 1.0], [0.0, 100.0, 0.0]]).view(2, 3, 1, 1, 1, 1)
    run = Followed(tc(budget_frames=7, threshold=0.999, bias_correction=0), make=lambda *at: factor * plain(*at) + offset).go(42)
    assert max(len(m) for m in run.members.values()) >= 5
    wanted = run.expected(42, 3, 0)
    got = run.call("denoise", 42, 3)[0]
    assert (got - wanted).abs().max() <= 1e-3, "logits reach hundreds, where float32 has steps of 1e-5"
    assert (got - run.expected(42, 3, 0, bias=False)).abs().max() > 1e-2


def test_a_medoid_is_the_member_nearest_to_the_mean_when_it_last_changed() -> None:
    run = Followed(tc(budget_frames=7, representative="medoid", threshold=0.8, floor=0.5)).go(42)
    pool, far = run.pool(), 0
    for (layer, _, _, slot), members in run.members.items():
        if layer:
            continue
        rotary = run.policy.rotary
        keys = torch.stack([rotary.rotate(run.qkv("clean", f, 1, 0)[1], [f])[0, c] for f, c in members])
        held = pool.keys.read()[0, :, slot]
        assert (keys - held).abs().amax((1, 2)).min() == 0 or all((keys[:, h] - held[h]).abs().amax(1).min() == 0 for h in range(2))
        distance = (keys - keys.mean(0)).square().sum(-1)
        mine = (held - keys.mean(0)).square().sum(-1)
        far += int((mine > distance.amax(0) + 1e-6).sum())
        if len(members) == 1:
            assert torch.equal(held, keys[0])
    assert far == 0
    assert max(len(m) for m in run.members.values()) >= 3
