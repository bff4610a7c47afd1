"""Puts settings on a clone of a MODEL, where our samplers and the bridge to the stock AR sampler find them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...fastar_core.geometry import kv_bytes_per_frame
from ...fastar_core.settings import FastARSettings
from .hook import check_model
from .native_ar import serve_stock_sampler

SETTINGS_KEY = "fastar"


def settings_of(model: Any) -> FastARSettings:
    """The settings a model carries; defaults when it comes from another loader."""
    return model.model_options.get("transformer_options", {}).get(SETTINGS_KEY) or FastARSettings()


def with_settings(model: Any, **changes: Any) -> Any:
    """A clone that carries the model's settings with ``changes``. Raises UnsupportedError for other kinds of models."""
    check_model(model.model.diffusion_model)
    settings = replace(settings_of(model), **changes)
    clone = model.clone()
    options = dict(clone.model_options.get("transformer_options", {}))
    options[SETTINGS_KEY] = settings
    clone.model_options["transformer_options"] = options
    if any(part is not None for part in (settings.policy, settings.annca, settings.annsa)):
        serve_stock_sampler(clone)
    return clone


def bytes_per_frame(model: Any, width: int, height: int) -> int:
    """Bytes of keys and values of one latent frame at that size in pixels, over all layers."""
    network = model.model.diffusion_model
    tokens = -(-width // 16) * -(-height // 16)
    return kv_bytes_per_frame(len(network.blocks), network.dim, tokens, model.model_dtype().itemsize)
