"""A guider whose positive prompt changes at latent frames, without losing the cache of the branch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable
from typing import Any

import comfy.samplers

from ...fastar_core.errors import ConfigError

FIRST = "positive"


def _role(frame: int) -> str:
    """Name of a prompt among the host's conds: the hook reads the part before "@" as the branch."""
    return FIRST if frame == 0 else f"{FIRST}@{frame}"


class StreamGuider(comfy.samplers.CFGGuider):
    """cfg guider over a list of (first latent frame, CONDITIONING); the first must begin at frame 0.

    At cfg 1 the negative is not even registered, so that no negative call can be made. Raises ConfigError for prompts
    that cannot share one cache, and for cfg without a negative.
    """

    def __init__(self, model_patcher: Any, prompts: list[tuple[int, Any]], negative: Any = None,
                 cfg: float = 1.0) -> None:
        super().__init__(model_patcher)
        self._check(prompts, negative, cfg)
        self.starts = [frame for frame, _ in prompts]
        conds = {_role(frame): cond for frame, cond in prompts}
        if cfg != 1.0:
            conds["negative"] = negative
        self.inner_set_conds(conds)
        self.set_cfg(cfg)
        self.current: Hashable = 0

    @staticmethod
    def _check(prompts: list[tuple[int, Any]], negative: Any, cfg: float) -> None:
        starts = [frame for frame, _ in prompts]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ConfigError(f"prompts begin at latent frames {starts}; expected rising frames, the first 0. "
                              "Use FAST-AR Prompts")
        for frame, cond in prompts:
            if not cond:
                raise ConfigError(f"the prompt from latent frame {frame} on holds no conditioning; connect a CLIP Text "
                                  "Encode")
            if len(cond) != len(prompts[0][1]):
                raise ConfigError(f"the prompt from latent frame {frame} on has {len(cond)} conditioning entries, the first "
                                  f"prompt has {len(prompts[0][1])}; each entry keeps a cache of its own, so all prompts "
                                  "need the same number")
        if cfg != 1.0 and not negative:
            raise ConfigError(f"cfg is {cfg:g}, which needs a negative prompt; connect negative or set cfg to 1")

    @property
    def branches(self) -> int:
        """Conditioning entries that take part in a call; each has a cache of its own."""
        return len(self.original_conds[FIRST]) + len(self.original_conds.get("negative", ()))

    def prompt_at(self, frame: int) -> int:
        """Id (= first latent frame) of the prompt that holds for a block beginning at latent frame ``frame``."""
        return self.starts[bisect_right(self.starts, frame) - 1]

    def use(self, prompt_id: Hashable) -> None:
        """Chooses the prompt of the next model calls."""
        self.current = prompt_id

    def predict_noise(self, x: Any, timestep: Any, model_options: Any = None, seed: Any = None) -> Any:
        """The host's prediction with the positive conditioning of the current prompt."""
        positive = self.conds[_role(int(self.current))]  # type: ignore[call-overload]
        negative = self.conds.get("negative")
        return comfy.samplers.sampling_function(self.inner_model, x, timestep, negative, positive, self.cfg,
                                                model_options=model_options or {}, seed=seed)
