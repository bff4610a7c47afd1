"""One streaming run of the sampler node: checks, plan, sampling, decoding, files, report."""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from comfy.model_management import throw_exception_if_processing_interrupted

from ...fastar_core.clock import Clock
from ...fastar_core.decode_plan import AT_END, BETWEEN, in_words, plan_decode
from ...fastar_core.drivers import BlockDone, BlockwisePlan, num_model_calls
from ...fastar_core.errors import ConfigError
from ...fastar_core.geometry import pixel_frames_for
from ...fastar_core.kernel_report import summary
from ...fastar_core.presets import schedule
from ...fastar_core.report_text import report_in_words
from ...fastar_core.run_choice import choose_policy, choose_run, unused_policy
from ...fastar_core.runstate import RunState
from ...fastar_core.stream_choice import (
    Canvas,
    Choice,
    choose_preset,
    draw_noise,
    goes_to_file,
    kept_in_words,
    unused_prompts,
)
from .anchor import AnchorFrames
from .decode import check_vae
from .frames_out import FileFrames, FramesOut, MemoryFrames, preview_entries
from .guider import StreamGuider
from .hook import check_model
from .memory import check_ram, make_room, plan_cache
from .memory_swap import ensure_loaded
from .prefix import find_prefix
from .preview import StreamProgress, make_previewer, show_text
from .rescue import close_after
from .sampling import StreamRequest, make_stream_sampler, run_parts
from .vae_probe import choose_decoder, decoder_bytes, probe

logger = logging.getLogger(__name__)


@dataclass
class StreamInputs:
    """What the node was given; sizes in pixels and pixel frames, ``fps`` 0 = the preset's."""

    model: Any
    positive: Any
    vae: Any
    width: int
    height: int
    length: int
    fps: float
    seed: int
    preset: str = "auto"
    cache: str = "preset"
    window: int = 12
    sink: int = 3
    cfg: float = 1.0
    frames_to: str = "auto"
    decode: str = "auto"
    filename_prefix: str = "video/FAST-AR"
    batch_size: int = 1
    negative: Any = None
    prompts: list[tuple[int, Any]] | None = None
    prompt_switch: str = "preset"
    start_image: torch.Tensor | None = None
    start_latent: dict[str, Any] | None = None
    prompt: Any = None
    extra_pnginfo: Any = None
    unique_id: str | None = None


@dataclass
class StreamResult:
    """``latent`` [B, 16, T, h, w] on the CPU, ``images`` [frames, H, W, 3], a host VIDEO per row, report text, ui data."""

    latent: torch.Tensor
    images: torch.Tensor
    videos: list[Any]
    report: str
    ui: dict[str, Any]


class StreamJob:
    """Everything is checked in the constructor, before a model is loaded or a file is made."""

    def __init__(self, inputs: StreamInputs) -> None:
        self.inputs = inputs
        self.clock = Clock()
        options = inputs.model.model_options.get("transformer_options", {})
        self.settings = options.get("fastar")
        preset, warnings = choose_preset(inputs.preset, self.settings)
        policy = choose_policy(inputs.cache, inputs.window, inputs.sink, preset, self.settings)
        warnings += unused_policy(inputs.cache, self.settings)
        check_model(inputs.model.model.diffusion_model)
        check_vae(inputs.vae)
        prompts = inputs.prompts or [(0, inputs.positive)]
        self.guider = StreamGuider(inputs.model, prompts, inputs.negative, inputs.cfg)
        size = Canvas(inputs.width, inputs.height, inputs.length, inputs.batch_size)
        with self.clock.measure("vae"):
            self.prefix = find_prefix(inputs.start_latent, inputs.start_image, options, inputs.vae, size)
        batch, given = (inputs.batch_size, 0) if self.prefix is None else (self.prefix.shape[0], self.prefix.shape[2])
        canvas = Canvas(inputs.width, inputs.height, inputs.length, batch, given)
        run = choose_run(preset, policy, len(schedule(preset).sigmas), inputs.prompt_switch, len(prompts) > 1)
        self.choice = Choice(preset, run, canvas, inputs.fps or preset.fps, inputs.seed, inputs.cfg, warnings)
        if inputs.prompts and inputs.positive is not inputs.prompts[0][1]:
            self.choice.warnings.append("prompts are connected, so positive is not used")
        self.choice.warnings += unused_prompts(self.guider.starts, canvas, preset.block)
        self.latents: list[torch.Tensor] = [] if self.prefix is None else [self.prefix]
        self.decoded = self._next = 0
        self.files = goes_to_file(inputs.frames_to, inputs.length)
        self.anchors = AnchorFrames(inputs.vae, run.restart)
        self._plan()

    def _plan(self) -> None:
        canvas, patcher = self.choice.canvas, self.guider.model_patcher
        geometry = canvas.geometry(self.choice.run, len(patcher.model.diffusion_model.blocks))
        self.cache = plan_cache(patcher, self.choice.policy, geometry, canvas.latent_shape, self.guider.branches,
                                sorted_copy=self.settings is not None and self.settings.annsa is not None)
        self.cache.check(canvas)
        self.choice.run = replace(self.choice.run, policy=self.cache.policy)
        if not self.files:
            check_ram(canvas)
        with self.clock.measure("vae"):
            found = probe(self.inputs.vae, self.choice.preset.block)
        self.decoder = choose_decoder(self.inputs.vae, found)
        self.probed = found.line
        needed = decoder_bytes(self.inputs.vae, found, canvas.batch, self.choice.preset.block, *canvas.latent_shape[3:])
        anchored = self.choice.run.needs_anchor(canvas.latent_frames)
        if anchored and found.kind == "whole":
            raise ConfigError(f"{self.choice.preset.label} encodes a decoded frame again before its blocks, and {found.line}; "
                              "connect the Wan 2.1 VAE")
        forced = AT_END if found.kind == "whole" else BETWEEN if anchored else self.inputs.decode
        if found.kind == "whole":
            self.choice.warnings.append(found.line)
        plan = plan_decode(patcher.model_size() + self.cache.call_bytes, self.cache.kv_bytes, needed,
                           self.cache.room_bytes, canvas.latent_frames, forced)
        reason = f"{self.choice.preset.label} encodes a decoded frame again before its blocks"
        self.plan = replace(plan, reason=reason) if anchored else plan

    # -- running ------------------------------------------------------------------------------------------------------

    def run(self) -> StreamResult:
        """Samples, decodes and writes. Whatever ends the run early leaves as it came, once files are closed and named."""
        logger.info("FAST-AR: %s", self._start_line())
        frames = self._open_frames()
        counts: dict[str, Any] = {}
        try:
            with self.clock.measure("sampling"):
                self._sample(frames, counts)
            self._decode_rest(frames)
            frames.close()
        except BaseException as failure:
            close_after(failure, frames, self.latents, self.inputs.filename_prefix, self.decoded)
            raise
        finally:
            self.decoder.close()
        return self._result(frames, counts)

    def _open_frames(self) -> FramesOut:
        given, choice = self.inputs, self.choice
        if not self.files:
            return MemoryFrames(choice.canvas, choice.fps)
        return FileFrames(choice.canvas, choice.fps, given.filename_prefix, given.prompt, given.extra_pnginfo)

    def _sample(self, frames: FramesOut, counts: dict[str, Any]) -> None:
        """The guider gets one block of zeros, so the host plans memory for one block; the noise is in the request."""
        choice, guider = self.choice, self.guider
        shape = choice.canvas.latent_shape
        own = getattr(self.inputs.vae.first_stage_model, "preview_format", None)
        previewer = make_previewer(guider.model_patcher.load_device, own or guider.model_patcher.model.latent_format)
        progress = StreamProgress(self.inputs.unique_id, previewer, choice.canvas.length)
        request = self._request(counts)

        def on_start(_: RunState, plan: BlockwisePlan) -> None:
            make_room(guider.model_patcher, self.cache.kv_bytes + self.cache.call_bytes)
            progress.start(plan.blocks, num_model_calls(request.loop, plan))

        def on_call(prompt_id: Hashable) -> None:
            guider.use(prompt_id)
            progress.call()

        def on_block(done: BlockDone, latent: torch.Tensor) -> None:
            self.latents.append(latent)
            if self.plan.mode == BETWEEN:
                self._decode(frames)
                ensure_loaded(guider.model_patcher, self.cache.call_bytes)
            progress.block(done.block)

        request.on_start, request.on_call, request.on_block = on_start, on_call, on_block
        request.on_step = lambda block, step, steps, x0: progress.step(x0[:, :, :block.num_frames])
        blank = torch.zeros((*shape[:2], min(choice.run.call_frames, shape[2]), *shape[3:]))
        sigmas = torch.tensor([*request.schedule.sigmas, 0.0])
        guider.sample(blank, blank.clone(), make_stream_sampler(request), sigmas, disable_pbar=True, seed=choice.seed)
        progress.finish()

    def _request(self, counts: dict[str, Any]) -> StreamRequest:
        choice, run = self.choice, self.choice.run
        noise = draw_noise(choice.seed, choice.canvas.latent_shape, choice.canvas.prefix_frames, choice.preset)
        restart = None if run.restart is None else replace(run.restart, anchor=self._anchor)
        return StreamRequest(run.policy, schedule(choice.preset), run.block, choice.seed, choice.preset, noise, self.prefix,
                             self.guider.prompt_at, **run_parts(self.settings),
                             loop=run.loop, recache_frames=run.recache_frames, rebuild=run.rebuild, restart=restart,
                             solver=run.solver, report=counts)

    def _anchor(self, pixel_from_end: int) -> torch.Tensor:
        """That pixel frame of the video so far as a clean latent in model space; everything finished is decoded already."""
        finished = pixel_frames_for(sum(latent.shape[2] for latent in self.latents))
        patcher = self.guider.model_patcher
        with self.clock.measure("vae"):
            latent = self.anchors.encode(finished - pixel_from_end)
        ensure_loaded(patcher, self.cache.call_bytes)
        return patcher.model.process_latent_in(latent)

    def _decode(self, frames: FramesOut) -> None:
        """Decodes the latents that are finished and not decoded yet, in pieces of a block."""
        with self.clock.measure("vae"):
            while self._next < len(self.latents):
                for piece in self.latents[self._next].split(self.choice.preset.block, 2):
                    throw_exception_if_processing_interrupted()
                    pictures = self.decoder.push(piece)
                    self.anchors.add(pictures)
                    frames.add(pictures)
                    self.decoded += piece.shape[2]
                self._next += 1

    def _decode_rest(self, frames: FramesOut) -> None:
        self._decode(frames)
        with self.clock.measure("vae"):
            frames.add(self.decoder.flush())

    # -- report -------------------------------------------------------------------------------------------------------

    def _start_line(self) -> str:
        choice, canvas = self.choice, self.choice.canvas
        backend = run_parts(self.settings).get("backend", "auto")
        kernels = summary(backend, self.guider.model_patcher.load_device)
        return (f"{canvas.batch} x {canvas.length} frames of {canvas.width} x {canvas.height} ({canvas.latent_frames} latent "
                f"frames, blocks of {choice.preset.block}, {canvas.prefix_frames} given), {choice.preset.key}; the cache keeps "
                f"{kept_in_words(choice.policy)}: {self.cache}; {self.plan}; frames to {'file' if self.files else 'memory'}; "
                f"{kernels}")

    def _result(self, frames: FramesOut, counts: dict[str, Any]) -> StreamResult:
        images, videos = frames.images(), frames.videos()
        report = self._report(frames, counts)
        seconds = report["seconds"]
        logger.info("FAST-AR: done, %d frames in %.1f s (sampling %.1f, VAE %.1f); cache peak %s%s", frames.count,
                    seconds["total"], seconds["sampling"], seconds["vae"], in_words(int(report["bytes"]["kv_peak"])),
                    "".join(f"; {path}" for path, _ in frames.files()))
        show_text(self.inputs.unique_id, report_in_words(report))
        text = json.dumps(report, indent=2)
        ui = {"fastar_report": [text], **preview_entries(frames.files())}
        return StreamResult(torch.cat(self.latents, 2).float(), images, videos, text, ui)

    def _report(self, frames: FramesOut, counts: dict[str, Any]) -> dict[str, Any]:
        canvas = self.choice.canvas
        for text in self.choice.warnings:
            logger.warning("FAST-AR: %s", text)
        return {
            "settings": self.choice.as_report(),
            "frames": {"latent": canvas.latent_frames, "computed": canvas.computed_frames, "delivered": frames.count,
                       "to": "file" if self.files else "memory"},
            "decode": {"mode": self.plan.mode, "reason": self.plan.reason, "how": self.probed},
            "bytes": {"kv_planned": self.cache.kv_bytes, "kv_peak": counts.get("cache_peak_bytes", 0),
                      **self.plan.numbers},
            "counts": _counts(counts),
            "seconds": self.clock.split(),
            "files": [{"path": str(path), "frames": count} for path, count in frames.files()],
            "warnings": self.choice.warnings,
        }


def _counts(run: dict[str, Any]) -> dict[str, Any]:
    """Model calls per phase, attention calls that were ours, branches (conditioning entries with their own cache)."""
    calls = dict(run.get("model_calls", {}))
    attention = calls.pop("attention_calls", 0)
    return {"model_calls": calls, "attention_calls": attention, "branches": run.get("branches", 0),
            **{name: run[name] for name in ("annca", "annsa", "cache") if name in run}}
