"""The SAMPLER for the host's own Custom Sampling nodes: same engine, the host's noise, sigmas, guider and callback."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import comfy.samplers
import torch

from ...fastar_core.drivers import BlockwisePlan, LoopKind, num_steps
from ...fastar_core.errors import ConfigError, GeometryError
from ...fastar_core.geometry import PIXELS_PER_LATENT, Block, pixel_frames_for
from ...fastar_core.kernel_report import summary
from ...fastar_core.presets import Preset
from ...fastar_core.run_choice import RunChoice, choose_policy, choose_run, unused_policy
from ...fastar_core.runstate import RunState
from ...fastar_core.stream_choice import Canvas, Choice, choose_preset, given_schedule
from .hook import check_model
from .memory import CachePlan, active_branches, make_room, plan_cache
from .prefix import find_prefix
from .sampling import StreamRequest, make_stream_sampler, run_parts

logger = logging.getLogger(__name__)


class _HostCallback:
    """The host's callback counts as many ticks as there are sigmas; these are spread over the whole run and never fall.

    Pictures show the newest latent frame; the last call carries everything: the host makes its second output of it.
    """

    def __init__(self, callback: Any, ticks: int) -> None:
        self.callback = callback
        self.ticks = ticks
        self.total = self.done = 0

    def start(self, plan: BlockwisePlan, loop: LoopKind) -> None:
        self.total = num_steps(loop, plan)

    def step(self, block: Block, step: int, steps: int, x0: torch.Tensor) -> None:
        self.done += 1
        self._tell(self.done * self.ticks // max(1, self.total), x0[:, :, block.num_frames - 1:block.num_frames])

    def finish(self, latents: torch.Tensor) -> None:
        self._tell(self.ticks, latents)

    def _tell(self, finished_ticks: int, x0: torch.Tensor) -> None:
        if self.callback is not None:
            self.callback({"i": max(0, min(self.ticks, finished_ticks) - 1), "denoised": x0, "x": x0})


def _canvas(x: torch.Tensor) -> Canvas:
    """Sizes of the latent the host brings."""
    if x.ndim != 5:
        raise GeometryError(f"streaming needs a video latent of 5 dimensions [batch, 16, frames, height, width], got "
                            f"{tuple(x.shape)}; use an empty video latent")
    batch, _, frames, rows, columns = x.shape
    return Canvas(columns * PIXELS_PER_LATENT, rows * PIXELS_PER_LATENT, pixel_frames_for(frames), batch)


def _check_run(run: RunChoice, preset: Preset, total_frames: int) -> None:
    """Raises ConfigError, before any model call, for a family that needs the VAE while it samples."""
    if run.needs_anchor(total_frames):
        raise ConfigError(f"{preset.label} encodes a decoded frame again while it samples, for more than "
                          f"{run.restart.rollout_frames if run.restart else 0} latent frames, and a SAMPLER has no VAE; use the "
                          "FAST-AR Streaming Sampler node with its vae input connected, or a shorter video")


class PlainSampler:
    """The choices of the SAMPLER node; everything of a run is made in the run."""

    def __init__(self, preset: str, cache: str, window: int, sink: int) -> None:
        self.preset, self.cache, self.window, self.sink = preset, cache, window, sink

    @torch.no_grad()
    def sample(self, model: Any, x: torch.Tensor, sigmas: torch.Tensor, extra_args: dict[str, Any] | None = None,
               callback: Any = None, disable: Any = None) -> torch.Tensor:
        """The host's sampler function: x [B, 16, T, h, w] noise in, latents in model space out."""
        guider, extra = model.inner_model, extra_args or {}
        options = extra.get("model_options", {}).get("transformer_options", {})
        settings = options.get("fastar")
        preset, warnings = choose_preset(self.preset, settings)
        policy = choose_policy(self.cache, self.window, self.sink, preset, settings)
        warnings += unused_policy(self.cache, settings)
        check_model(guider.inner_model.diffusion_model)
        canvas = _canvas(x)
        prefix = find_prefix(None, None, options, None, canvas)
        canvas = replace(canvas, prefix_frames=0 if prefix is None else prefix.shape[2])
        seed = int(extra.get("seed") or 0)
        steps = given_schedule(sigmas.tolist(), preset)
        run = choose_run(preset, policy, len(steps.sigmas))
        _check_run(run, preset, canvas.latent_frames)
        choice = Choice(preset, run, canvas, preset.fps, seed, getattr(guider, "cfg", 1.0), warnings)
        told = _HostCallback(callback, len(sigmas) - 1)
        request = StreamRequest(run.policy, steps, run.block, seed, preset, prefix=prefix, on_step=told.step,
                                **run_parts(settings), loop=run.loop,
                                restart=run.restart, solver=run.solver)
        plan = self._plan(guider, choice, request.annsa is not None)
        request.policy = plan.policy
        request.on_start = self._starter(guider, choice, plan, told)
        function = make_stream_sampler(request).sampler_function
        out = function(model, x, sigmas, extra_args=extra, callback=None, disable=disable)
        told.finish(out)
        logger.info("FAST-AR: %s", request.report)
        return out

    @staticmethod
    def _plan(guider: Any, choice: Choice, annsa: bool) -> CachePlan:
        geometry = choice.canvas.geometry(choice.run, len(guider.inner_model.diffusion_model.blocks))
        plan = plan_cache(guider.model_patcher, choice.policy, geometry, choice.canvas.latent_shape, active_branches(guider),
                          sorted_copy=annsa)
        plan.check(choice.canvas)
        return plan

    @staticmethod
    def _starter(guider: Any, choice: Choice, plan: CachePlan, told: _HostCallback) -> Any:
        for text in choice.warnings:
            logger.warning("FAST-AR: %s", text)

        def on_start(state: RunState, blocks: BlockwisePlan) -> None:
            logger.info("FAST-AR: %d latent frames, %s, cache %s; %s", choice.canvas.latent_frames, choice.preset.key, plan,
                        summary(state.attention.backend, plan.device))
            make_room(guider.model_patcher, plan.kv_bytes + plan.call_bytes)
            told.start(blocks, choice.run.loop)

        return on_start


def make_plain_sampler(preset: str, cache: str, window: int, sink: int) -> Any:
    """A host SAMPLER with these choices; runs made with it share nothing."""
    return comfy.samplers.KSAMPLER(PlainSampler(preset, cache, window, sink).sample)
