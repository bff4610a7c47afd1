"""The pack's engine driven by the plain Wan forward: no host anywhere. Also records every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.geometry import RunGeometry, token_grid
from fastar_pack.fastar_core.policies import PolicySettings
from fastar_pack.fastar_core.positions import RopeSpec
from fastar_pack.fastar_core.runstate import RunState
from tiny.wan_plain import layer_count, wan_forward


@dataclass
class PlainEngine:
    """A ModelCall over native weights. ``prompts[ctx.prompt_id]`` is the text [B, L, text_dim]."""

    weights: dict[str, torch.Tensor]
    prompts: list[torch.Tensor]
    num_heads: int
    shape: tuple[int, ...]
    block: int
    settings: PolicySettings
    sinusoid_dtype: torch.dtype = torch.float32
    record: list[tuple[FwdCtx, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    keep_calls: bool = False
    on_attend: Callable[[int, FwdCtx], None] | None = None
    call_frames: int = 0

    def __post_init__(self) -> None:
        rows, cols = token_grid(*self.shape[3:])
        dim = self.weights["head.modulation"].shape[-1]
        geometry = RunGeometry(self.shape[2], self.block, rows, cols, layer_count(self.weights), self.call_frames)
        self.run = RunState(self.settings, geometry, RopeSpec(dim // self.num_heads))

    def velocity(self, x: torch.Tensor, ctx: FwdCtx) -> torch.Tensor:
        policy = self.run.policy("positive")
        t = torch.tensor(ctx.timesteps, dtype=torch.float32)[None].expand(x.shape[0], -1)
        return wan_forward(self.weights, x, t, self.prompts[int(ctx.prompt_id)], num_heads=self.num_heads,
                           attend=lambda layer, q, k, v: policy.attend(layer, q, k, v, ctx), sinusoid_dtype=self.sinusoid_dtype)

    def __call__(self, x: torch.Tensor, ctx: FwdCtx) -> torch.Tensor:
        self.run.begin(ctx)
        v = self.velocity(x, ctx)
        self.run.end()
        sigma = torch.tensor(ctx.sigmas, dtype=x.dtype)[None, None, :, None, None]
        x0 = x - sigma * v
        if self.keep_calls:
            self.record.append((ctx, x0, v))
        return x0
