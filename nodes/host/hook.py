"""Turns the host's ordinary Wan forward into a causal, cached one: no module surgery, no process-wide patch.

Four entries of one call's transformer_options do it all, and vanish with the call:
* rope_options with scale 0 make the host's rotation the identity, so q and k reach us exactly as they left QK-norm;
* patches_replace["dit"] marks the block that is running, so the first attention in it is known to be self-attention;
* optimized_attention_override hands that attention to the cache policy of each branch, and the text attention to AnnCA;
* a DIFFUSION_MODEL wrapper tells which rows of the batch belong to which branch, and sets per-frame timesteps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import comfy.model_management
import comfy.patcher_extension
import torch

from ...fastar_core.annca.pruner import PromptCall
from ...fastar_core.context import FwdCtx
from ...fastar_core.errors import UnsupportedError
from ...fastar_core.positions import RopeSpec
from ...fastar_core.runstate import RunState

WRAPPER_KEY = "fastar"
STREAMING = "fastar_streaming"
IDENTITY_ROPE = {f"{kind}_{axis}": 0.0 for kind in ("scale", "shift") for axis in "tyx"}
SUPPORTED_CLASSES = ("WanModel", "CausalWanModel")
# A one-sigma call cannot say per-frame sigmas; x - denoised is the velocity exactly when the scalar sigma is 1.
PER_FRAME_SIGMA = 1.0


def check_model(diffusion_model: Any) -> None:
    """Raises UnsupportedError for model classes whose forward this hook does not know."""
    name = type(diffusion_model).__name__
    if name not in SUPPORTED_CLASSES:
        raise UnsupportedError(f"the model is a {name}; FAST-AR streaming needs a Wan 2.1 text-to-video layout "
                               f"({', '.join(SUPPORTED_CLASSES)}). Load a Self-Forcing or Causal-Forcing style checkpoint")
    if diffusion_model.model_type != "t2v" or diffusion_model.in_dim != diffusion_model.out_dim:
        raise UnsupportedError(f"this Wan model is of type {diffusion_model.model_type} with {diffusion_model.in_dim} input and "
                               f"{diffusion_model.out_dim} output channels; streaming needs a text-to-video checkpoint (16 and 16)")


def rope_spec(diffusion_model: Any, transformer_options: dict[str, Any]) -> RopeSpec:
    """Rotary settings of the model, with the user's own scale and shift nodes read in."""
    user = transformer_options.get("rope_options") or {}
    scales = tuple(float(user.get(f"scale_{axis}", 1.0)) for axis in "tyx")
    shifts = tuple(float(user.get(f"shift_{axis}", 0.0)) for axis in "tyx")
    head_dim = diffusion_model.dim // diffusion_model.num_heads
    return RopeSpec(head_dim, float(diffusion_model.rope_embedder.theta), scales, shifts)  # type: ignore[arg-type]


def branch_names(conds: dict[str, list[dict[str, Any]]]) -> dict[Any, Hashable]:
    """uuid of every conditioning entry -> branch; "positive@12" names a later prompt of the branch "positive"."""
    return {entry["uuid"]: (role.split("@")[0], i) for role, entries in conds.items() for i, entry in enumerate(entries or ())}


def describe(function: object) -> str:
    """Module and name of a function, for messages."""
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', type(function).__name__)}"


class CallHooks:
    """What makes one model call a cached one: ``options`` are the transformer_options to call the model with.

    Around each call: start_call(ctx), the call, end_call(). Lives as long as its run.
    """

    def __init__(self, diffusion_model: Any, run: RunState, branches: dict[Any, Hashable], options: dict[str, Any]) -> None:
        self.run = run
        self.branches = branches
        self.diffusion_model = diffusion_model
        self.num_layers = len(diffusion_model.blocks)
        self.previous = options.get("optimized_attention_override")
        self.options = self._with_hooks(options)
        self._row_branches: list[Hashable] = []
        self._layer: int | None = None
        self._text_layer: int | None = None
        self._handled = 0
        self._served: set[tuple[Hashable, int]] = set()

    # -- installing ---------------------------------------------------------------------------------------------------

    def _with_hooks(self, old: dict[str, Any]) -> dict[str, Any]:
        replace = dict(old.get("patches_replace", {}))
        dit = dict(replace.get("dit", {}))
        for layer in range(self.num_layers):
            key = ("double_block", layer)
            dit[key] = self._block(layer, dit.get(key))
        replace["dit"] = dit
        kind = comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL
        wrappers = {k: dict(v) for k, v in old.get("wrappers", {}).items()}
        wrappers.setdefault(kind, {})[WRAPPER_KEY] = [self._forward]
        return {**old, STREAMING: True, "rope_options": dict(IDENTITY_ROPE), "patches_replace": replace, "wrappers": wrappers,
                "optimized_attention_override": self.attention}

    def _block(self, layer: int, previous: Callable[..., Any] | None) -> Callable[..., Any]:
        def marked(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
            active = args["transformer_options"].get("optimized_attention_override")
            if active != self.attention:
                raise UnsupportedError(f"FAST-AR is not active: its attention was overridden by {describe(active)}. Put the "
                                       "FAST-AR node after the node that sets this attention")
            self._layer = layer
            try:
                return previous(args, extra) if previous is not None else extra["original_block"](args)
            finally:
                self._layer = self._text_layer = None

        return marked

    # -- one model call -----------------------------------------------------------------------------------------------

    def start_call(self, ctx: FwdCtx) -> None:
        """Announces the next model call."""
        self._handled = 0
        self._served.clear()
        self.run.begin(ctx)

    def end_call(self) -> None:
        """Commits what the call's phase commits. Raises when the call did not reach every layer."""
        self.run.end()
        if self._handled % self.num_layers:
            raise UnsupportedError(f"{self._handled} self-attention calls were handled, expected a multiple of "
                                   f"{self.num_layers} layers; another node skips or repeats blocks of the model")
        self.run.counters["attention_calls"] += self._handled

    def _forward(self, executor: Any, x: torch.Tensor, timestep: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        ctx = self.run.ctx
        options = kwargs.get("transformer_options") or next((a for a in args if isinstance(a, dict)), {})
        self._row_branches = self._branches_of(options)
        if ctx is not None and self.run.prompts is not None:
            context = args[0] if args else kwargs.get("context")
            self.run.prompts.start_call(context, options["uuids"], PromptCall(max(ctx.sigmas), ctx.num_frames, (ctx.block, ctx.start)))
        if ctx is not None:
            told = torch.tensor(ctx.timesteps, dtype=timestep.dtype, device=timestep.device)
            timestep = told[:1].expand(x.shape[0]) if ctx.uniform else told[None].expand(x.shape[0], -1)
        return executor(x, timestep, *args, **kwargs)

    def _branches_of(self, options: dict[str, Any]) -> list[Hashable]:
        uuids = options.get("uuids")
        if not uuids:
            raise UnsupportedError("the host did not say which conditioning entries a call holds (transformer_options['uuids']); "
                                   "a node that calls the model by itself cannot be combined with FAST-AR streaming")
        seen: dict[Hashable, int] = {}
        names = []
        for uuid, index in zip(uuids, options["cond_or_uncond"]):
            rank = seen[index] = seen.get(index, -1) + 1
            names.append(self.branches.get(uuid, ("entry", index, rank)))
        return names

    # -- attention ----------------------------------------------------------------------------------------------------

    def attention(self, func: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int,
                  *args: Any, **kwargs: Any) -> torch.Tensor:
        """The override. Self-attention of a marked block goes to the cache, everything else to who was here before."""
        layer = self._layer
        if layer is None:
            out = self._text_attention(q, k, v, heads, kwargs)
            return self._pass_on(func, q, k, v, heads, *args, **kwargs) if out is None else out
        self._layer, self._text_layer = None, layer
        if self.run.ctx is None or kwargs.get("mask") is not None or q.ndim != 3:
            raise UnsupportedError("self-attention arrived masked, reshaped or outside a block of the driver; remove the node that "
                                   "changes this model's self-attention")
        self._claim(layer)
        rows = q.shape[0] // len(self._row_branches)

        def dense(qh: torch.Tensor, kh: torch.Tensor, vh: torch.Tensor) -> torch.Tensor:
            flat = (t.flatten(2) for t in (qh, kh, vh))
            return self._pass_on(func, *flat, qh.shape[2], *args, **kwargs).unflatten(-1, (qh.shape[2], -1))

        self.run.attention.dense = dense
        split = [t.unflatten(-1, (heads, -1)).split(rows) for t in (q, k, v)]
        parts = [self.run.policy(branch).attend(layer, qb, kb, vb, self.run.ctx).flatten(2)
                 for branch, qb, kb, vb in zip(self._row_branches, *split)]
        self._handled += 1
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _text_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int,
                        options: dict[str, Any]) -> torch.Tensor | None:
        """The text attention of a marked block, told by the length of its keys; None = not ours to change."""
        run, layer = self.run, self._text_layer
        self._text_layer = None  # a second one in the block (a guidance node's own prompt) is not the prompt of the call
        if layer is None or run.ctx is None or q.ndim != 3 or options.get("mask") is not None:
            return None
        q, k, v = (t.unflatten(-1, (heads, -1)) for t in (q, k, v))
        if run.sparse is not None and run.sparse.shared is not None:
            for branch, rows in zip(self._row_branches, q.split(q.shape[0] // len(self._row_branches))):
                run.sparse.shared.note(run.policy(branch), layer, rows, run.ctx)
        out = None if run.prompts is None or k.shape[1] != run.prompts.text_rows else run.prompts.attend(layer, q, k, v)
        return None if out is None else out.flatten(2)

    def _claim(self, layer: int) -> None:
        """A branch attends once per layer and call; a second time would overwrite its keys with others."""
        for branch in self._row_branches:
            if (branch, layer) in self._served:
                raise UnsupportedError("a conditioning entry was evaluated twice in one step, or two entries cannot be told apart: "
                                       "the cache of one would hold the keys of the other. Guidance nodes such as perturbed "
                                       "attention or skip layer do that; remove them")
            self._served.add((branch, layer))

    def _pass_on(self, func: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.previous is not None:
            return self.previous(func, *args, **kwargs)
        return func(*args, **kwargs)


class HostModel(CallHooks):
    """A ModelCall over the host's sampler model: x [B, C, n, h, w] and a FwdCtx in, x0 out."""

    def __init__(self, model: Any, extra_args: dict[str, Any], run: RunState, branches: dict[Any, Hashable]) -> None:
        self.model = model
        model_options = extra_args.get("model_options", {})
        super().__init__(model.inner_model.inner_model.diffusion_model, run, branches, model_options.get("transformer_options", {}))
        self.extra_args = {**extra_args, "model_options": {**model_options, "transformer_options": self.options}}
        self.device = model.inner_model.model_patcher.load_device

    def __call__(self, x: torch.Tensor, ctx: FwdCtx) -> torch.Tensor:
        comfy.model_management.throw_exception_if_processing_interrupted()
        x = x.to(self.device)
        sigma = ctx.sigmas[0] if ctx.uniform else PER_FRAME_SIGMA
        self.start_call(ctx)
        try:
            denoised = self.model(x, x.new_full((x.shape[0],), sigma), **self.extra_args)
            self.end_call()
        finally:
            self.run.attention.dense = None
        if ctx.uniform:
            return denoised
        per_frame = torch.tensor(ctx.sigmas, dtype=x.dtype, device=x.device)[None, None, :, None, None]
        return x - per_frame * (x - denoised) / PER_FRAME_SIGMA
