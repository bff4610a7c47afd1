"""Runs of the host's own tiny models through the pack's sampler, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from core.engine_tools import HEADS, TEXT, tiny_weights
from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.geometry import RunGeometry, token_grid
from fastar_pack.fastar_core.noise import seeded_normal
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.runstate import RunState
from fastar_pack.fastar_core.sigmas import SigmaSchedule
from tiny.golden import Golden
from tiny.host_models import unet_config

NOISE = (1, 16, 6, 8, 12)
SCHEDULE = SigmaSchedule((1.0, 0.625))
Driver = Callable[[Callable[[Tensor, FwdCtx], Tensor], Tensor], Tensor]


def build(weights: dict[str, Tensor], heads: int, text_dim: int, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A ModelPatcher of the host's Wan class from an explicit configuration, computing in ``dtype``."""
    import comfy.model_detection
    import comfy.model_management
    import comfy.model_patcher

    config = comfy.model_detection.model_config_from_unet_config(unet_config(weights, heads, text_dim) | changes)
    config.set_inference_dtype(dtype, None)
    model = config.get_model({}, "")
    if not changes:
        model.diffusion_model.load_state_dict(weights, strict=True)
    device, offload = comfy.model_management.get_torch_device(), comfy.model_management.unet_offload_device()
    return comfy.model_patcher.ModelPatcher(model.to(offload), load_device=device, offload_device=offload)


def tiny_model(dtype: torch.dtype = torch.float32, seed: int = 1) -> Any:
    return build(tiny_weights(seed, channels=16), HEADS, TEXT, dtype)


def load_from_file(golden: Golden, folder: Path) -> Any:
    """The golden weights as a model file through the host's stock loader; 0.3.75 ignores the metadata."""
    import comfy.sd

    path = folder / "model.safetensors"
    save_file({f"model.{key}": value for key, value in golden.weights.items()}, path, {"config": golden.config or "{}"})
    return comfy.sd.load_diffusion_model(str(path))


def prompt(seed: int, batch: int = 1, rows: int = 5, width: int = TEXT) -> Tensor:
    return seeded_normal(seed, (batch, rows, width))


def entries(text: Tensor | list) -> list:
    return text if isinstance(text, list) else [[text, {}]]


def sample(
    patcher: Any,
    sampler: Any,
    noise: Tensor,
    positive: Tensor | list,
    negative: Tensor | list | None = None,
    cfg: float = 1.0,
    sigmas: tuple[float, ...] = (1.0, 0.0),
    seed: int = 0,
) -> Tensor:
    """Latents in model space, through the host's guider."""
    import comfy.samplers

    guider = comfy.samplers.CFGGuider(patcher)
    guider.set_conds(entries(positive), [] if negative is None else entries(negative))
    guider.set_cfg(cfg)
    with torch.inference_mode():
        out = guider.sample(noise.clone(), torch.zeros_like(noise), sampler, torch.tensor(sigmas), seed=seed)
        return patcher.model.process_latent_in(out).float().clone()


def stream(
    patcher: Any,
    noise: Tensor,
    positive: Tensor | list,
    negative: Tensor | list | None = None,
    cfg: float = 1.0,
    policy: PolicySettings | None = None,
    schedule: SigmaSchedule = SCHEDULE,
    block: int = 3,
    seed: int = 0,
    **options: Any,
) -> Tensor:
    """A streaming run; ``options`` are further fields of the request."""
    from fastar_pack.nodes.host.sampling import StreamRequest, make_stream_sampler

    request = StreamRequest(policy or PolicySettings(), schedule, block, seed, **options)
    return sample(patcher, make_stream_sampler(request), noise, positive, negative, cfg, seed=seed)


def driven(driver: Driver, total: int, policy: PolicySettings | None = None) -> Any:
    """A host SAMPLER that hands ``driver`` a ModelCall over the hook, and its noise: loops of the tests' own making."""
    import comfy.samplers

    from fastar_pack.nodes.host.hook import HostModel, branch_names, rope_spec

    def run(model: Any, x: Tensor, sigmas: Tensor, extra_args: dict[str, Any], callback: Any, disable: Any) -> Tensor:
        network = model.inner_model.inner_model.diffusion_model
        rows, cols = token_grid(*x.shape[3:])
        options = extra_args["model_options"].get("transformer_options", {})
        geometry = RunGeometry(total, 3, rows, cols, len(network.blocks))
        state = RunState(policy or PolicySettings(), geometry, rope_spec(network, options))
        call = HostModel(model, extra_args, state, branch_names(model.inner_model.conds))
        try:
            return driver(call, x)
        finally:
            state.close()

    return comfy.samplers.KSAMPLER(run)


def plain_call(sigma: float = 0.7) -> Any:
    """A host SAMPLER of one ordinary model call, without anything of ours."""
    import comfy.samplers

    def run(model: Any, x: Tensor, sigmas: Tensor, extra_args: dict[str, Any], callback: Any, disable: Any) -> Tensor:
        return model(x, x.new_full((x.shape[0],), sigma), **extra_args)

    return comfy.samplers.KSAMPLER(run)


def with_option(patcher: Any, **options: Any) -> Any:
    """A clone with entries in transformer_options."""
    clone = patcher.clone()
    clone.model_options["transformer_options"] = {**clone.model_options.get("transformer_options", {}), **options}
    return clone


def with_forward_wrapper(patcher: Any, wrapper: Callable[..., Any]) -> Any:
    """A clone with a DIFFUSION_MODEL wrapper, as another pack would add it."""
    import comfy.patcher_extension

    clone = patcher.clone()
    clone.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "another pack", wrapper)
    return clone


def options_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """transformer_options among the arguments of a DIFFUSION_MODEL wrapper."""
    return kwargs.get("transformer_options") or next(a for a in args if isinstance(a, dict))


@contextmanager
def two_calls(patcher: Any, when: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Makes the host run conditional and unconditional one after the other while ``when`` says so."""
    plain = patcher.model.memory_required

    def required(*args: Any, **kwargs: Any) -> float:
        return float("inf") if when() else plain(*args, **kwargs)

    patcher.model.memory_required = required
    try:
        yield
    finally:
        del patcher.model.memory_required
