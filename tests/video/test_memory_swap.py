"""A memory manager that unloads the model that is sampling whenever another one is loaded."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from fastar_pack.fastar_core.errors import MemoryPlanError
from tests_support import Host

pytestmark = pytest.mark.cpu


class Factor(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)


class Scale(torch.nn.Module):
    """A model of one weight; stands for the diffusion model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Factor()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.layer.weight


class Vae:
    """What use_vae needs of a VAE object."""

    def __init__(self) -> None:
        self.patcher = patcher_of(Scale())
        self.disable_offload = False


def patcher_of(model: torch.nn.Module) -> Any:
    from comfy.model_patcher import ModelPatcher

    return ModelPatcher(model, load_device=torch.device("cpu"), offload_device=torch.device("cpu"))


def with_lora(model: torch.nn.Module) -> Any:
    """A patcher whose weight patch adds 2."""
    patcher = patcher_of(model)
    assert patcher.add_patches({"layer.weight": (torch.full((4,), 2.0),)}) == ["layer.weight"]
    return patcher


class StingyManager:
    """Keeps one model loaded at a time, through the host's own load and detach; `lazy` forgets to load the last asked."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []
        self.asked: list[tuple[list[Any], float]] = []
        self.lazy = False

    def load_models_gpu(self, models: list[Any], memory_required: float = 0, **_: Any) -> None:
        self.asked.append((list(models), memory_required))
        for patcher in [p for p in self.loaded if p not in models]:
            patcher.detach()
            self.loaded.remove(patcher)
        for patcher in models:
            if patcher not in self.loaded and not self.lazy:
                patcher.partially_load(patcher.load_device, 1e32)
                self.loaded.append(patcher)


@pytest.fixture
def manager(host: Host, monkeypatch: pytest.MonkeyPatch) -> StingyManager:
    from comfy import model_management

    stingy = StingyManager()
    monkeypatch.setattr(model_management, "load_models_gpu", stingy.load_models_gpu)
    return stingy


@pytest.fixture(scope="module")
def swap(host: Host) -> ModuleType:
    return importlib.import_module("fastar_pack.nodes.host.memory_swap")


def test_the_model_comes_back_with_its_patches(manager: StingyManager, swap: ModuleType) -> None:
    model = Scale()
    patcher, vae, x = with_lora(model), Vae(), torch.ones(4)
    manager.load_models_gpu([patcher])
    assert torch.equal(model(x), torch.full((4,), 3.0))
    for need in (1000, 2000):
        swap.use_vae(vae, need)
        assert manager.asked[-1] == ([vae.patcher], need)
        assert torch.equal(model(x), torch.ones(4))  # the wrong variant: whoever samples on now has lost the LoRA
        swap.after_vae(patcher, 77)
        assert manager.asked[-1] == ([patcher], 77)
        assert torch.equal(model(x), torch.full((4,), 3.0))


def test_companions_come_back_too(manager: StingyManager, swap: ModuleType) -> None:
    patcher, companion = with_lora(Scale()), patcher_of(Scale())
    swap.use_vae(Vae(), 0)
    swap.ensure_loaded(patcher, 0, [companion])
    assert manager.loaded == [patcher, companion]


def test_a_model_that_does_not_come_back_is_an_error(manager: StingyManager, swap: ModuleType) -> None:
    patcher, vae = with_lora(Scale()), Vae()
    manager.load_models_gpu([patcher])
    swap.use_vae(vae, 0)
    manager.lazy = True
    with pytest.raises(MemoryPlanError, match=r"1 weight patches \(LoRA\) are not applied.*at the end"):
        swap.after_vae(patcher)


def test_weights_elsewhere_are_an_error(manager: StingyManager, swap: ModuleType) -> None:
    model, manager.lazy = Scale(), True
    patcher, vae = patcher_of(model), Vae()
    model.layer.weight = torch.nn.Parameter(model.layer.weight.to("meta"), requires_grad=False)
    with pytest.raises(MemoryPlanError, match=r"1 of its weights are not on cpu \(the first: layer\.weight\)"):
        swap.ensure_loaded(patcher)
    model.model_lowvram = True  # partly loaded by the host: it moves weights at each call
    swap.ensure_loaded(patcher)
    model.device = torch.device("meta")
    with pytest.raises(MemoryPlanError, match="it is on meta, expected on cpu"):
        swap.ensure_loaded(patcher)
    vae.patcher.model.device = torch.device("meta")
    with pytest.raises(MemoryPlanError, match="could not load the VAE"):
        swap.use_vae(vae, 0)


def test_names_of_one_device(swap: ModuleType) -> None:
    assert swap.same_device("cuda", "cuda:0")
    assert not swap.same_device("cuda:1", "cuda:0")
    assert not swap.same_device("cpu", "cuda")


def test_decoding_between_model_calls_of_the_real_host(host: Host, swap: ModuleType) -> None:
    """With the host's own memory manager: load, use a VAE, go on; the patched weights are the same."""
    model = Scale()
    patcher, vae = with_lora(model), Vae()
    swap.ensure_loaded(patcher)
    swap.use_vae(vae, 10**6)
    swap.after_vae(patcher)
    assert torch.equal(model(torch.ones(4)), torch.full((4,), 3.0))
    patcher.detach()
