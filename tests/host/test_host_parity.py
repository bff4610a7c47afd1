"""Our runs equal the stock AR sampler of 0.27, and both hosts give the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from core.engine_tools import HEADS, TEXT, tiny_weights
from fastar_pack.fastar_core.noise import seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from host.host_tools import SCHEDULE, prompt, sample, stream, with_option
from host.parity_runs import parity_runs
from tests_support import Host

pytestmark = pytest.mark.cpu
OTHER_HOST = "FASTAR_TEST_HOST_27"
STOCK_TOLERANCE = 5e-6
SIGMAS = (*SCHEDULE.sigmas, 0.0)


@pytest.fixture(scope="module")
def causal(host: Host) -> Any:
    """A tiny model of the host's own causal class, as its loader builds it from metadata."""
    if tuple(int(part) for part in host.version.split(".")[:2]) < (0, 27):
        pytest.skip(f"ComfyUI {host.version} has no AR sampler of its own; 0.27 has")
    import comfy.sd

    config = f'{{"transformer": {{"causal_ar": true, "num_heads": {HEADS}, "text_dim": {TEXT}}}}}'
    patcher = comfy.sd.load_diffusion_model_state_dict(tiny_weights(channels=16), metadata={"config": config})
    assert type(patcher.model.diffusion_model).__name__ == "CausalWanModel"
    return patcher


def stock(patcher: Any, noise: Tensor, text: Tensor, block: int, seed: int) -> Tensor:
    import comfy.samplers

    sampler = comfy.samplers.ksampler("ar_video", {"num_frame_per_block": block})
    return sample(patcher, sampler, noise, text, sigmas=SIGMAS, seed=seed)


@pytest.mark.parametrize(("frames", "block", "batch"), [(4, 1, 1), (9, 3, 1), (7, 3, 1), (5, 4, 2), (6, 3, 2)])
def test_equals_the_stock_ar_sampler(frames: int, block: int, batch: int, causal: Any) -> None:
    noise, text = seeded_normal(4, (batch, 16, frames, 10, 12)), prompt(21, batch)
    want = stock(causal, noise, text, block, seed=17)
    got = stream(causal, noise, text, block=block, seed=17)
    assert (got - want).abs().max() <= STOCK_TOLERANCE
    assert want.std() > 0.1


@pytest.mark.parametrize(("frames", "block", "batch"), [(4, 1, 1), (8, 3, 1), (6, 3, 2)])
def test_equals_the_stock_ar_sampler_from_an_image(frames: int, block: int, batch: int, causal: Any) -> None:
    noise, text = seeded_normal(5, (batch, 16, frames, 8, 12)), prompt(22, batch)
    image = seeded_normal(6, (batch, 16, 1, 8, 12))
    want = stock(with_option(causal, ar_config={"initial_latent": image}), noise, text, block, seed=18)
    got = stream(causal, noise, text, block=block, seed=18, prefix=image)
    assert (got - want).abs().max() <= STOCK_TOLERANCE
    assert (stream(causal, noise, text, block=block, seed=18) - want).abs().max() > 1e-2


@pytest.mark.parametrize("wrong", [{"block": 1}, {"seed": 1}, {"policy": PolicySettings("sink_window", 6)}])
def test_another_setting_is_far_from_stock(wrong: dict[str, Any], causal: Any) -> None:
    noise, text = seeded_normal(4, (1, 16, 9, 8, 12)), prompt(21)
    want = stock(causal, noise, text, 3, seed=17)
    assert (stream(causal, noise, text, **({"block": 3, "seed": 17} | wrong)) - want).abs().max() > 1e-3


def test_both_hosts_give_the_same_bits(host: Host, tmp_path: Path) -> None:
    named = os.environ.get(OTHER_HOST)
    if not named or Path(named).expanduser().resolve() == host.path:
        pytest.skip(f"{OTHER_HOST} names no second ComfyUI checkout")
    target = tmp_path / "other.safetensors"
    (tmp_path / "there").mkdir()
    (tmp_path / "here").mkdir()
    script = Path(__file__).with_name("parity_runs.py")
    command = [sys.executable, str(script), str(Path(named).expanduser().resolve()), str(tmp_path / "there"), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    here = parity_runs(tmp_path / "here")
    with safe_open(str(target), "pt") as file:
        assert file.metadata()["version"] != host.version
        there = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    assert there.keys() == here.keys()
    assert [key for key in here if not torch.equal(here[key], there[key])] == []
    assert len({float(value.double().sum()) for value in here.values()}) == len(here), "the runs differ from each other"
