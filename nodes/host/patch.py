"""Puts settings on a clone of a MODEL, where our samplers and the bridge to the stock AR sampler find them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...fastar_core.geometry import kv_bytes_per_frame
from ...fastar_core.settings import FastARSettings
from .hook import check_model
from .native_ar import serve_stock_sampler
from .other_models import why_not
from .whole_video import serve_whole_video

SETTINGS_KEY = "fastar"


def settings_of(model: Any) -> FastARSettings:
    """The settings a model carries; defaults when it comes from another loader."""
    return model.model_options.get("transformer_options", {}).get(SETTINGS_KEY) or FastARSettings()


def _clone_with(model: Any, changes: dict[str, Any]) -> tuple[Any, FastARSettings]:
    settings = replace(settings_of(model), **changes)
    clone = model.clone()
    options = dict(clone.model_options.get("transformer_options", {}))
    options[SETTINGS_KEY] = settings
    clone.model_options["transformer_options"] = options
    return clone, settings


def with_attention_settings(model: Any, text: bool, on_report: Callable[[dict[str, object]], None] | None = None,
                            **changes: Any) -> tuple[Any, str | None]:
    """(clone that carries AnnCA (``text``) or AnnSA settings, None), or (the model itself, why not).

    The clone serves streaming runs, the host's own AR sampler and ordinary sampling alike; ``on_report`` gets the counts of an
    ordinary run.
    """
    network = model.model.diffusion_model
    reason = why_not(network, text)
    if reason is not None:
        return model, reason
    clone, _ = _clone_with(model, changes)
    serve_whole_video(clone, on_report)
    if hasattr(network, "init_kv_caches"):
        serve_stock_sampler(clone)
    return clone, None


def with_settings(model: Any, **changes: Any) -> Any:
    """A clone that carries the model's settings with ``changes``. Raises UnsupportedError for other kinds of models."""
    check_model(model.model.diffusion_model)
    clone, settings = _clone_with(model, changes)
    if settings.policy is not None:
        serve_stock_sampler(clone)
    return clone


def bytes_per_frame(model: Any, width: int, height: int) -> int:
    """Bytes of keys and values of one latent frame at that size in pixels, over all layers."""
    network = model.model.diffusion_model
    tokens = -(-width // 16) * -(-height // 16)
    return kv_bytes_per_frame(len(network.blocks), network.dim, tokens, model.model_dtype().itemsize)
