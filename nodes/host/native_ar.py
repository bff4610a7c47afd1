"""Serves the host's own SamplerARVideo: its calls are answered from our cache instead of its full-length buffers.

The stock loop keeps one growing buffer per layer and marks its calls with ``ar_state``. An APPLY_MODEL wrapper takes that mark
out, so that the ordinary forward runs with our hooks, and moves the loop's end markers as it expects. The buffers themselves are
never allocated. On hosts without that sampler nothing of this is ever called.
"""

from __future__ import annotations

import logging
from typing import Any

import comfy.patcher_extension
import torch

from ...fastar_core.context import FwdCtx
from ...fastar_core.geometry import PIXELS_PER_LATENT, RunGeometry, pixel_frames_for, token_grid
from ...fastar_core.policies import PolicySettings
from ...fastar_core.runstate import RunState
from ...fastar_core.settings import FastARSettings
from ...fastar_core.sigmas import TRAIN_STEPS
from ...fastar_core.stream_choice import Canvas, kept_in_words
from ...fastar_core.tempcache.fitting import fit_family
from .hook import WRAPPER_KEY, CallHooks, branch_names, check_model, rope_spec
from .memory import CachePlan, active_branches, plan_cache

logger = logging.getLogger(__name__)
PER_CALL_KEYS = ("uuids", "cond_or_uncond", "sigmas", "sample_sigmas")


class _NativeRun:
    """One sampling run of the stock loop. The cache is made at its first marked call."""

    def __init__(self, guider: Any, total_frames: int, block: int) -> None:
        self.guider = guider
        self.total_frames = total_frames
        self.block = block
        self.hooks: CallHooks | None = None

    def _start(self, x: torch.Tensor, options: dict[str, Any]) -> CallHooks:
        settings: FastARSettings = options["fastar"]
        network = self.guider.inner_model.diffusion_model
        check_model(network)
        plan = self._plan(x, options, settings)
        geometry = self._geometry(x, len(network.blocks))
        state = RunState(plan.policy, geometry, rope_spec(network, options), settings.backend,
                         options["sample_sigmas"].tolist(), settings.annca, settings.annsa)
        return CallHooks(network, state, branch_names(self.guider.conds), options)

    def _geometry(self, x: torch.Tensor, num_layers: int) -> RunGeometry:
        """The first call may hold given frames, more than a block of them."""
        return RunGeometry(self.total_frames, self.block, *token_grid(*x.shape[3:]), num_layers, max(self.block, x.shape[2]))

    def _plan(self, x: torch.Tensor, options: dict[str, Any], settings: FastARSettings) -> CachePlan:
        """What the cache will hold, checked and told before anything is allocated."""
        guider = self.guider
        policy = fit_family(settings.policy or PolicySettings(), settings.preset, self.block)
        geometry = self._geometry(x, len(guider.inner_model.diffusion_model.blocks))
        shape = (x.shape[0] // max(1, len(options["uuids"])), x.shape[1], self.total_frames, *x.shape[3:])
        plan = plan_cache(guider.model_patcher, policy, geometry, shape, active_branches(guider), settings.annsa is not None)
        plan.check(Canvas(PIXELS_PER_LATENT * x.shape[4], PIXELS_PER_LATENT * x.shape[3], pixel_frames_for(self.total_frames), shape[0]))
        logger.info("FAST-AR: %d latent frames in blocks of %d by the stock AR sampler; the cache keeps %s: %s", self.total_frames,
                    self.block, kept_in_words(plan.policy), plan)
        return plan

    def call(self, executor: Any, x: torch.Tensor, sigma: torch.Tensor, concat: Any, cross: Any, control: Any,
             options: dict[str, Any], **kwargs: Any) -> torch.Tensor:
        marks = options["ar_state"]
        if self.hooks is None:
            self.hooks = self._start(x, options)
        frames, value = x.shape[2], float(sigma.flatten()[0])
        rows, cols = token_grid(*x.shape[3:])
        ctx = FwdCtx("denoise" if value > 0 else "clean", marks["start_frame"], frames, (value,) * frames,
                     (value * TRAIN_STEPS,) * frames, rows, cols, 0, marks["start_frame"] // self.block)
        told = {key: value for key, value in options.items() if key in PER_CALL_KEYS}
        self.hooks.start_call(ctx)
        try:
            out = executor(x, sigma, concat, cross, control, {**self.hooks.options, **told, "ar_state": None}, **kwargs)
            self.hooks.end_call()
        finally:
            self.hooks.run.attention.dense = None
        for buffer in marks["kv_caches"]:
            buffer["end"] += frames * rows * cols
        return out

    def close(self) -> None:
        if self.hooks is not None:
            logger.info("FAST-AR: the stock AR sampler ran through the cache: %s", self.hooks.run.report())
            self.hooks.run.close()


def _empty_buffers(num_layers: int) -> Any:
    """Stands in for the model's init_kv_caches: only the end markers the stock loop moves."""

    def init_kv_caches(*_sizes: Any, **_options: Any) -> list[dict[str, int]]:
        return [{"end": 0} for _ in range(num_layers)]

    return init_kv_caches


def serve_stock_sampler(model: Any) -> None:
    """Adds the wrappers to a model clone that carries FastARSettings with a cache policy. Adding them twice is one time."""
    active: list[_NativeRun] = []

    def outer(executor: Any, noise: torch.Tensor, latent: Any, sampler: Any, *args: Any, **kwargs: Any) -> Any:
        block = int(getattr(sampler, "extra_options", {}).get("num_frame_per_block", 1))
        run = _NativeRun(executor.class_obj, noise.shape[2] if noise.ndim == 5 else 1, block)
        active.append(run)
        try:
            return executor(noise, latent, sampler, *args, **kwargs)
        finally:
            active.remove(run)
            run.close()

    def apply_model(executor: Any, x: torch.Tensor, sigma: torch.Tensor, concat: Any = None, cross: Any = None,
                    control: Any = None, transformer_options: dict[str, Any] | None = None, **kwargs: Any) -> torch.Tensor:
        options = transformer_options or {}
        if not active or not options.get("ar_state"):
            return executor(x, sigma, concat, cross, control, options, **kwargs)
        return active[-1].call(executor, x, sigma, concat, cross, control, options, **kwargs)

    kinds = comfy.patcher_extension.WrappersMP
    for kind, function in ((kinds.OUTER_SAMPLE, outer), (kinds.APPLY_MODEL, apply_model)):
        model.remove_wrappers_with_key(kind, WRAPPER_KEY)
        model.add_wrapper_with_key(kind, WRAPPER_KEY, function)
    network = model.model.diffusion_model
    if hasattr(network, "init_kv_caches"):
        model.add_object_patch("diffusion_model.init_kv_caches", _empty_buffers(len(network.blocks)))
