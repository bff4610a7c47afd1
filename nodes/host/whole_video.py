"""AnnCA and AnnSA on models that denoise a whole video at once, under any sampler of the host.

An OUTER_SAMPLE wrapper owns the state of a run, an APPLY_MODEL wrapper marks the blocks and takes the attention override for the
length of one call. Calls of a streaming run pass by: there the cache policies and CallHooks do this work.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import comfy.patcher_extension
import torch

from ...fastar_core.annca import PromptPruner
from ...fastar_core.annca.pruner import PromptCall
from ...fastar_core.annsa.video import VideoSparse
from ...fastar_core.attention import Attention
from ...fastar_core.errors import UnsupportedError
from ...fastar_core.settings import FastARSettings
from .hook import STREAMING, describe
from .other_models import ModelRow, row_of, why_not

logger = logging.getLogger(__name__)
KEY = "fastar_whole_video"
Layout = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class WholeVideoRun:
    """State of one sampling run: what is known about the prompts and the buckets, and counts."""

    def __init__(self, network: Any, row: ModelRow, settings: FastARSettings, options: dict[str, Any]) -> None:
        self.network, self.row = network, row
        schedule = options["sample_sigmas"].tolist()
        self.attention = Attention(settings.backend)
        self.prompts = None
        if settings.annca is not None and why_not(network, text=True) is None:
            self.prompts = PromptPruner(settings.annca, self.attention, schedule)
        self.sparse = None if settings.annsa is None else VideoSparse(settings.annsa, schedule, settings.backend)
        self.model_calls = self.handled = 0
        self.masked = 0
        self._layer: int | None = None
        self._text_layer: int | None = None
        self._image_attention = False
        self._sigma = 0.0
        self._shape: tuple[int, ...] = ()
        self._previous: Callable[..., torch.Tensor] | None = None
        self._joint_calls = 0

    # -- one model call -----------------------------------------------------------------------------------------------

    def call(self, executor: Any, x: torch.Tensor, sigma: torch.Tensor, concat: Any, cross: Any, control: Any,
             options: dict[str, Any], **kwargs: Any) -> torch.Tensor:
        """One APPLY_MODEL call. Entries of different noise levels in one call (none of the host's samplers makes them) stay dense."""
        self._sigma = float(sigma.max()) if bool((sigma == sigma.flatten()[0]).all()) else 0.0
        self._shape = tuple(x.shape)
        self._previous = options.get("optimized_attention_override")
        self._joint_calls = 0
        before = self.handled
        if self.sparse is not None:
            self.sparse.start_call(self._sigma, False)
        if self.prompts is not None:
            text = cross if isinstance(cross, torch.Tensor) else None
            self.prompts.start_call(text, options.get("uuids") or (), PromptCall(self._sigma, x.shape[2], "whole video"))
        out = executor(x, sigma, concat, cross, control, self._marked(options), **kwargs)
        self.model_calls += 1
        if self.handled == before:
            raise UnsupportedError("FAST-AR AnnCA / AnnSA saw no attention of the model in a whole call: another node replaced its "
                                   "blocks or its attention. Put the FAST-AR node after that node")
        return out

    def _marked(self, old: dict[str, Any]) -> dict[str, Any]:
        replace = dict(old.get("patches_replace", {}))
        dit = dict(replace.get("dit", {}))
        for layer, (name, index) in enumerate(self.row.layers(self.network)):
            if name:
                dit[(name, index)] = self._block(layer, dit.get((name, index)))
        replace["dit"] = dit
        return {**old, "patches_replace": replace, "optimized_attention_override": self.override}

    def _block(self, layer: int, previous: Callable[..., Any] | None) -> Callable[..., Any]:
        def marked(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
            active = args["transformer_options"].get("optimized_attention_override")
            if active != self.override:
                raise UnsupportedError(f"FAST-AR AnnCA / AnnSA is not active: its attention was overridden by {describe(active)}. Put "
                                       "the FAST-AR node after the node that sets this attention")
            self._layer = layer
            text = 0 if self.prompts is None else self.prompts.text_rows
            self._image_attention = self.row.kind == "cross" and text > 0 and args["txt"].shape[1] > text
            try:
                return previous(args, extra) if previous is not None else extra["original_block"](args)
            finally:
                self._layer = self._text_layer = None

        return marked

    # -- attention ----------------------------------------------------------------------------------------------------

    def override(self, func: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, *args: Any,
                 **kwargs: Any) -> torch.Tensor:
        """The attention override: video self-attention and text cross-attention of marked blocks are ours, where that is possible."""

        def dense(*qkv: torch.Tensor) -> torch.Tensor:
            if self._previous is not None:
                return self._previous(func, *qkv, heads, *args, **kwargs)
            return func(*qkv, heads, *args, **kwargs)

        layer, text_layer = self._next_call(k.shape[-2])
        if layer is None and text_layer is None:
            return dense(q, k, v)
        self.handled += layer is not None
        if _masked(args, kwargs):
            self.masked += 1
            return dense(q, k, v)
        apart = kwargs.get("skip_reshape", False)
        split = [t.transpose(1, 2) if apart else t.unflatten(-1, (heads, -1)) for t in (q, k, v)]
        if text_layer is not None:
            out = None if self.prompts is None else self.prompts.attend(text_layer, *split)
        else:
            out = self._self_attention(layer or 0, split, apart, dense)
        if out is None:
            return dense(q, k, v)
        return out.transpose(1, 2) if kwargs.get("skip_output_reshape") else out.flatten(2)

    def _next_call(self, rows: int) -> tuple[int | None, int | None]:
        """(layer, None) for video self-attention, (None, layer) for text cross-attention, (None, None) for other calls; ``rows`` of keys.

        A block whose context is longer than the prompt has image rows before it: its first cross-attention is that of the image.
        """
        if self.row.kind == "joint" and not self.row.blocks[0][1]:
            self._joint_calls += 1
            return self._joint_calls - 1, None
        if self._layer is not None:
            layer, self._layer = self._layer, None
            self._text_layer = layer if self.row.kind == "cross" else None
            return layer, None
        of_text = self.prompts is not None and rows == self.prompts.text_rows
        if self._text_layer is not None and of_text and not self._image_attention:
            layer, self._text_layer = self._text_layer, None  # a second one in the block belongs to another node's prompt
            return None, layer
        self._image_attention = False
        return None, None

    def _self_attention(self, layer: int, split: list[torch.Tensor], apart: bool, dense: Callable[..., Any]) -> torch.Tensor | None:
        if self.sparse is None:
            return None
        q, k, v = split
        heads, dim = q.shape[2:]

        def plain(*qkv: torch.Tensor) -> torch.Tensor:
            """The host's attention in its own layout; its result may or may not keep the heads apart."""
            out = dense(*(t.transpose(1, 2) if apart else t.flatten(2) for t in qkv))
            return out.transpose(1, 2) if out.ndim == 4 else out.unflatten(-1, (heads, dim))

        video = self.row.video_rows(self.network, self._shape, q.shape[1])
        return self.sparse.attend_video(layer, self._sigma, q, k, v, video, plain)

    # -- end ----------------------------------------------------------------------------------------------------------

    def report(self) -> dict[str, object]:
        """Counts of the run."""
        told = {name: part.report() for name, part in (("annca", self.prompts), ("annsa", self.sparse)) if part is not None}
        return {"model_calls": self.model_calls, "self_attention_calls": self.handled, "masked_calls": self.masked, **told}

    def close(self) -> None:
        """Says what was done and frees the tensors."""
        if self.model_calls:
            logger.info("FAST-AR: %s", self.report())
        for part in (self.prompts, self.sparse):
            if part is not None:
                part.close()


def _masked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call carries a mask, by name or as the first argument after ``heads``."""
    return kwargs.get("mask") is not None or bool(args and args[0] is not None)


def serve_whole_video(model: Any, on_report: Callable[[dict[str, object]], None] | None = None) -> None:
    """Adds the wrappers to a model clone that carries FastARSettings with AnnCA or AnnSA. Adding them twice is one time."""
    active: list[list[WholeVideoRun]] = []

    def outer(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(executor.class_obj, "model_options", {}).get("multigpu_clones"):
            raise UnsupportedError("multi-GPU clones call the model from several threads, and AnnCA / AnnSA keep one state per run; remove "
                                   "that node or the FAST-AR node")
        runs: list[WholeVideoRun] = []
        active.append(runs)
        try:
            return executor(*args, **kwargs)
        finally:
            active.remove(runs)
            for run in runs:
                if on_report is not None and run.model_calls:
                    on_report(run.report())
                run.close()

    def apply_model(executor: Any, x: torch.Tensor, sigma: torch.Tensor, concat: Any = None, cross: Any = None, control: Any = None,
                    transformer_options: dict[str, Any] | None = None, **kwargs: Any) -> torch.Tensor:
        options = transformer_options or {}
        streaming = options.get(STREAMING) or options.get("ar_state")
        settings = options.get("fastar")
        if not active or streaming or settings is None or x.ndim != 5:
            return executor(x, sigma, concat, cross, control, options, **kwargs)
        runs = active[-1]
        if not runs:
            network = executor.class_obj.diffusion_model
            row = row_of(network)
            if row is None:
                return executor(x, sigma, concat, cross, control, options, **kwargs)
            runs.append(WholeVideoRun(network, row, settings, options))
        return runs[0].call(executor, x, sigma, concat, cross, control, options, **kwargs)

    kinds = comfy.patcher_extension.WrappersMP
    for kind, function in ((kinds.OUTER_SAMPLE, outer), (kinds.APPLY_MODEL, apply_model)):
        model.remove_wrappers_with_key(kind, KEY)
        model.add_wrapper_with_key(kind, KEY, function)
