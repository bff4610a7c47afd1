"""Rotation: exact positions in every dtype, the user's scale and shift, and independence of the origin."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.engine_tools import FULL, Rollout, random_qkv, window
from fastar_pack.fastar_core.errors import GeometryError
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.positions import RopeSpec, Rotary
from tiny.wan_plain import grid_positions, rope_rotate

pytestmark = pytest.mark.cpu
LATE = [range(255, 259), range(1023, 1027), range(2047, 2051)]


@pytest.mark.parametrize("head_dim", [16, 24, 32, 128])
@pytest.mark.parametrize("grid", [(1, 1), (4, 6), (5, 3)])
def test_equals_an_independent_rotation(head_dim: int, grid: tuple[int, int]) -> None:
    frames = [0, 1, 7, 300]
    x = random_qkv(3, len(frames) * grid[0] * grid[1], head_dim=head_dim)[0]
    positions = torch.cat([grid_positions(1, *grid, f) for f in frames])
    got = Rotary(RopeSpec(head_dim), *grid).rotate(x, frames)
    assert (got - rope_rotate(x, positions)).abs().max() < 1e-6
    swapped = rope_rotate(x, positions[:, [0, 2, 1]])
    assert grid == (1, 1) or (got - swapped).abs().max() > 1e-2, "rows and columns must not be exchangeable"


def rotated(frames: range, dtype: torch.dtype) -> Tensor:
    """The same key at every frame, rotated: [frames, head_dim]."""
    key = random_qkv(4, 1, heads=1, head_dim=128)[1].to(dtype)
    return Rotary(RopeSpec(128), 1, 1).rotate(key.expand(1, len(frames), 1, 128), frames)[0, :, 0]


@pytest.mark.parametrize("frames", LATE)
def test_bfloat16_keys_stand_at_float32_positions(frames: range) -> None:
    low = rotated(frames, torch.bfloat16)
    key = random_qkv(4, 1, heads=1, head_dim=128)[1].bfloat16().float().expand(1, len(frames), 1, 128)
    exact = rope_rotate(key, grid_positions(len(frames), 1, 1, frames[0]))[0, :, 0].bfloat16()
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, exact)
    assert all(not torch.equal(low[i], low[j]) for i in range(4) for j in range(i))


@pytest.mark.parametrize("frames", LATE)
def test_positions_kept_in_bfloat16_would_collide(frames: range) -> None:
    low = torch.tensor(list(frames)).bfloat16()
    assert len(set(low.tolist())) < 4
    rotary = Rotary(RopeSpec(128), 1, 1)
    key = random_qkv(4, 1, heads=1, head_dim=128)[1].expand(1, 4, 1, 128)
    wrong = rotary.rotate(key, low.tolist())[0, :, 0]
    assert any(torch.equal(wrong[i], wrong[j]) for i in range(4) for j in range(i))
    assert (wrong - rotary.rotate(key, frames)[0, :, 0]).abs().max() > 1e-2


def test_far_positions_keep_float32_accuracy() -> None:
    rotary = Rotary(RopeSpec(128), 1, 1)
    cos, sin = rotary.table([10**6], torch.device("cpu"))
    angle = 10**6 * torch.tensor(10000.0, dtype=torch.float64) ** (-torch.arange(0, 44, 2, dtype=torch.float64) / 44)
    assert (cos[0, 0, 0, :22].double() - angle.cos()).abs().max() < 1e-7
    assert (sin[0, 0, 0, :22].double() - angle.sin()).abs().max() < 1e-7
    crude = (torch.tensor(10.0**6) * 10000.0 ** (-torch.arange(0, 44, 2) / 44)).cos()
    assert (crude.double() - angle.cos()).abs().max() > 1e-3


def test_the_users_scale_and_shift_are_applied() -> None:
    x = random_qkv(5, 2 * 3 * 4)[0]
    spec = RopeSpec(24, scales=(0.5, 2.0, 1.0), shifts=(5.0, 0.0, 3.0))
    positions = grid_positions(2, 3, 4, 10).double()
    scaled = torch.tensor([5.0, 0.0, 3.0]) + torch.tensor([0.5, 2.0, 1.0]) * positions
    got = Rotary(spec, 3, 4).rotate(x, [10, 11])
    assert (got - rope_rotate(x, scaled)).abs().max() < 1e-6
    assert (got - rope_rotate(x, positions)).abs().max() > 1e-2


def test_theta_is_respected() -> None:
    x = random_qkv(5, 2)[0]
    assert (
        Rotary(RopeSpec(24, theta=256.0), 1, 1).rotate(x, [9, 10]) - rope_rotate(x, grid_positions(2, 1, 1, 9), 256.0)
    ).abs().max() < 1e-6


def test_token_counts_are_checked() -> None:
    with pytest.raises(GeometryError, match="7 tokens do not match 2 latent frames of 2 x 3"):
        Rotary(RopeSpec(24), 2, 3).rotate(random_qkv(1, 7)[0], [0, 1])


def test_tables_are_not_computed_anew_for_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys of slot positions stand at different places: both tables must stay for the next layer."""
    computed: list[int] = []
    plain = Rotary.angles
    monkeypatch.setattr(Rotary, "angles", lambda self, frames: computed.append(len(frames)) or plain(self, frames))
    rollout = Rollout((1, 4, 9, 8, 12), 3, window(6, 3, positions="slot"))
    rollout.run()
    assert len(computed) <= 2 * len(rollout.calls)


def outputs(settings: PolicySettings, spec: RopeSpec) -> Tensor:
    rollout = Rollout((1, 4, 12, 8, 12), 3, settings)
    rollout.engine.run.rope = spec
    return rollout.run()


@pytest.mark.parametrize("settings", [FULL, window(6), window(8, 3), window(8, 3, positions="slot")])
def test_a_shift_of_all_positions_changes_nothing(settings: PolicySettings) -> None:
    plain = outputs(settings, RopeSpec(24))
    for shifts in ((40.0, 0.0, 0.0), (3.0, 11.0, 7.0)):
        assert (outputs(settings, RopeSpec(24, shifts=shifts)) - plain).abs().max() <= 1e-5
    assert (outputs(settings, RopeSpec(24, scales=(0.5, 1.0, 1.0))) - plain).abs().max() > 1e-3
