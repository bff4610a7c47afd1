"""The families bench: its gate notices a wrong cache, and with a red gate no ratio is given."""

from __future__ import annotations

import pytest
import torch

from bench import families
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.presets import get_preset
from tiny.weights import random_weights

pytestmark = pytest.mark.cpu
WEIGHTS = random_weights(families.HEADS * 64, families.LAYERS, 256, families.TEXT)


def test_the_check_passes_and_notices_merging() -> None:
    found = families.check(WEIGHTS)
    assert set(found) == {"self_forcing", "rolling_forcing", "krea"}
    assert max(found.values()) < families.TOLERANCE
    preset = get_preset("rolling_forcing")
    dense = families.rollout(WEIGHTS, preset, PolicySettings("rolling", None, 3), 18)
    merged = families.rollout(WEIGHTS, preset, families.tempcache(6, 3), 18)
    assert (dense.latents - merged.latents).abs().max() > families.TOLERANCE
    assert merged.bytes != dense.bytes
    assert len(dense.seconds) == 6


def test_a_red_gate_gives_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "check", lambda weights: {"krea": 0.5})
    threads = torch.get_num_threads()
    said: list[str] = []
    result = families.run([], said.append)
    assert torch.get_num_threads() == threads
    assert (result["gate"], result["rows"], said) == ("red", [{"check": "krea", "largest_difference": 0.5}], [])
    assert [(one["value"], one["holds"]) for one in result["targets"]] == [(None, None)] * 2
    assert all("differs from the dense cache" in one["reason"] for one in result["targets"])


def test_targets_compare_equal_numbers_of_attended_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"rolling_forcing": "stock", "time_vs_stock": 1.0}, {"rolling_forcing": "extended, equal attended", "time_vs_stock": 1.2},
            {"rolling_forcing": "extended, equal stored", "time_vs_stock": 1.4}]
    assert families.target(126, rows, "")["holds"] is False
    rows[1]["time_vs_stock"] = 1.09
    assert families.target(126, rows, "")["holds"] is True
    late = families.Late(random_weights(512, 2, 64, families.TEXT), families.tempcache(6, 3), 30, 1)
    policy = late.engine.run.policy
    late.engine.run.begin(late._context("denoise", 30, 15))
    sizes = policy("positive").sizes  # type: ignore[attr-defined]
    stock = families.Late(random_weights(512, 2, 64, families.TEXT), PolicySettings("rolling", 21, 3), 30, 1)
    stock.engine.run.begin(stock._context("denoise", 30, 15))
    attended = len(stock.engine.run.policy("positive").visible_frames(30, 15)) - 15
    assert sizes.sink + sizes.recent + sizes.history_rows / (late.rows * late.cols) == attended == 6
