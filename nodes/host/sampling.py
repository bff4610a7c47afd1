"""The sampler function behind both sampler nodes: one run from noise to latents, everything it keeps freed at the end."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import comfy.samplers
import torch

from ...fastar_core.annca import AnnCASettings
from ...fastar_core.annsa import AnnSASettings
from ...fastar_core.drivers import BlockDone, BlockwisePlan, LoopKind, Restart, longest_call, run_plan
from ...fastar_core.errors import ConfigError, UnsupportedError
from ...fastar_core.geometry import Block, RunGeometry, token_grid
from ...fastar_core.kernel_report import summary
from ...fastar_core.noise import SeededRenoise
from ...fastar_core.policies import PolicySettings
from ...fastar_core.runstate import RunState
from ...fastar_core.settings import FastARSettings
from ...fastar_core.sigmas import SigmaSchedule
from .hook import HostModel, branch_names, check_model, rope_spec

REFUSED_ENTRY_KEYS = {"area": "an area", "mask": "a mask", "hooks": "hooks", "gligen": "GLIGEN boxes", "control": "a ControlNet"}


@dataclass
class StreamRequest:
    """One streaming run.

    ``noise`` [B, 16, T, h, w] is the start noise of the whole length on the CPU; None takes what the host's sampler was given.
    ``prefix`` [B, 16, p, h, w] in VAE space holds clean latents 0 .. p - 1. ``prompt_at`` maps a latent frame to the prompt id
    the guider understands. ``on_block`` gets each finished block in VAE space on the CPU. ``report`` is filled at the end.
    """

    policy: PolicySettings
    schedule: SigmaSchedule
    block: int
    seed: int
    preset: Any = None
    noise: torch.Tensor | None = None
    prefix: torch.Tensor | None = None
    prompt_at: Callable[[int], Hashable] = lambda frame: 0
    backend: str = "auto"
    annca: AnnCASettings | None = None
    annsa: AnnSASettings | None = None
    clean_last: bool = False
    renoise: Any = None
    loop: LoopKind = "blockwise"
    recache_frames: int | None = None
    rebuild: bool = False
    restart: Restart | None = None
    solver: Any = "renoise"
    on_start: Callable[[RunState, BlockwisePlan], None] | None = None
    on_call: Callable[[Hashable], None] | None = None
    on_step: Callable[[Block, int, int, torch.Tensor], None] | None = None
    on_block: Callable[[BlockDone, torch.Tensor], None] | None = None
    report: dict[str, object] = field(default_factory=dict)


def run_parts(settings: FastARSettings | None) -> dict[str, Any]:
    """Fields of a request that a model's settings decide alone."""
    return {} if settings is None else {"backend": settings.backend, "annca": settings.annca, "annsa": settings.annsa}


def check_conds(conds: dict[str, list[dict[str, Any]]]) -> None:
    """Refuses conditioning entries whose effect depends on place or time: each would need a cache of its own."""
    for role, entries in conds.items():
        for entry in entries or ():
            found = [words for key, words in REFUSED_ENTRY_KEYS.items() if entry.get(key) is not None]
            if entry.get("timestep_start") is not None or entry.get("timestep_end") is not None:
                found.append("a timestep range")
            if found:
                raise UnsupportedError(f"the {role.split('@')[0]} conditioning has {' and '.join(found)}; a streaming run keeps one "
                                       "cache per conditioning entry for all steps. Use plain prompts, and FAST-AR Prompts for "
                                       "prompts that change over time")


def check_text(conds: dict[str, list[dict[str, Any]]], width: int | None) -> None:
    """Refuses prompt rows [B, rows, width] of another text encoder. ``width``: what the model takes; None = unknown."""
    for role, entries in conds.items():
        for entry in entries or ():
            rows = entry.get("cross_attn")
            if width is not None and rows is not None and rows.shape[-1] != width:
                raise UnsupportedError(f"the {role.split('@')[0]} conditioning has text rows of width {rows.shape[-1]}, the model takes "
                                       f"{width}; encode the prompt with the text encoder of the model (for Wan: umt5_xxl, loaded "
                                       "with type wan)")


def _plan(request: StreamRequest, x: torch.Tensor, process_in: Callable[[torch.Tensor], torch.Tensor]) -> BlockwisePlan:
    noise = x if request.noise is None else request.noise
    prefix = None if request.prefix is None else process_in(request.prefix).to(noise.dtype)
    renoise = request.renoise or SeededRenoise(request.seed)
    return BlockwisePlan(noise, request.schedule, request.block, renoise, prefix=prefix, prompt_at=request.prompt_at,
                         on_step=request.on_step, clean_last=request.clean_last, recache_frames=request.recache_frames,
                         rebuild=request.rebuild, restart=request.restart, solver=request.solver)


def _check_request(model: Any, extra_args: dict[str, Any]) -> None:
    options = extra_args.get("model_options", {})
    network = model.inner_model.inner_model.diffusion_model
    check_model(network)
    check_conds(model.inner_model.conds)
    check_text(model.inner_model.conds, getattr(network, "text_dim", None))
    if extra_args.get("denoise_mask") is not None:
        raise UnsupportedError("the latent carries a noise mask; streaming generates whole blocks. Remove Set Latent Noise Mask")
    if options.get("multigpu_clones") or options.get("context_handler") is not None:
        raise UnsupportedError("multi-GPU clones and context windows split a call over frames or devices; remove that node, the "
                               "cache replaces it")


class _Run:
    """Binds a request to the host's sampler arguments."""

    def __init__(self, request: StreamRequest, model: Any, x: torch.Tensor, extra_args: dict[str, Any]) -> None:
        _check_request(model, extra_args)
        self.request = request
        self.base = model.inner_model.inner_model
        self.plan = _plan(request, x, self.base.process_latent_in)
        network = self.base.diffusion_model
        rows, cols = token_grid(*self.plan.noise.shape[3:])
        geometry = RunGeometry(self.plan.timeline_frames, request.block, rows, cols, len(network.blocks),
                               longest_call(request.loop, self.plan))
        options = extra_args.get("model_options", {}).get("transformer_options", {})
        self.state = RunState(request.policy, geometry, rope_spec(network, options), request.backend, request.schedule.sigmas,
                              request.annca, request.annsa)
        self.host_model = HostModel(model, extra_args, self.state, branch_names(model.inner_model.conds))

    def call(self, x: torch.Tensor, ctx: Any) -> torch.Tensor:
        if self.request.on_call is not None:
            self.request.on_call(ctx.prompt_id)
        return self.host_model(x, ctx)

    def sample(self, out: torch.Tensor | None) -> None:
        """Runs all blocks; ``out`` receives the latents in model space, the request's on_block those in VAE space."""
        if self.request.on_start is not None:
            self.request.on_start(self.state, self.plan)
        self.request.report["kernels"] = summary(self.request.backend, self.host_model.device)
        if out is not None and self.plan.prefix is not None:
            out[:, :, :self.plan.prefix_frames] = self.plan.prefix
        for done in run_plan(self.request.loop, self.call, self.plan):
            start = done.block.start
            if out is not None:
                out[:, :, start:start + done.block.num_frames] = done.latent
            if self.request.on_block is not None:
                self.request.on_block(done, self.base.process_latent_out(done.latent.float()).cpu())
        self.request.report.update(self.state.report())


def make_stream_sampler(request: StreamRequest) -> comfy.samplers.KSAMPLER:
    """A host SAMPLER that runs ``request``. Returns latents of x's shape, or x itself when the request brings its own noise."""

    def sample(model: Any, x: torch.Tensor, _sigmas: torch.Tensor, extra_args: dict[str, Any] | None = None,
               **_host_options: Any) -> torch.Tensor:
        if x.ndim != 5:
            raise ConfigError(f"streaming needs a 5-D video latent [batch, channels, frames, height, width], got "
                              f"{tuple(x.shape)}; use an empty video latent")
        run = _Run(request, model, x, extra_args or {})
        out = torch.zeros_like(x) if request.noise is None else None
        try:
            run.sample(out)
        finally:
            run.state.close()
        return x if out is None else out

    return comfy.samplers.KSAMPLER(sample)
