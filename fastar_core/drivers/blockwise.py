"""The block-by-block sampler of Self-Forcing, Causal-Forcing, LongLive, CausVid and Krea (backbones 3.1, 3.4, 3.6, 3.7).

Per block: denoise steps, then one pass over the result at t = 0 that leaves clean keys and values for the blocks that follow.
LongLive adds a pass over the last clean latents when the prompt changes; CausVid and Krea start their timeline over.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..errors import ConfigError
from ..geometry import Block, prefix_chunks
from .plan import BlockDone, BlockwisePlan, ModelCall, Restart

__all__ = ["BlockDone", "BlockwisePlan", "ModelCall", "num_blockwise_calls", "prefill", "run_blockwise"]


def prefill(call: ModelCall, plan: BlockwisePlan, chunks: list[torch.Tensor], prompt_frame: int | None = None) -> None:
    """Feeds clean latents as frames 0, 1, ... through the model at t = 0, chunk by chunk, to fill the cache.

    ``prompt_frame``: the latent frame whose prompt holds for all of it; None = every chunk has its own.
    """
    start = 0
    for chunk in chunks:
        asked = start if prompt_frame is None else prompt_frame
        call(chunk, plan.context("prefill", start, chunk.shape[2], 0.0, 0.0, prompt_frame=asked))
        start += chunk.shape[2]


def in_chunks(latents: torch.Tensor, block: int) -> list[torch.Tensor]:
    """Clean latents cut into pieces of the block size."""
    return [latents[:, :, start:start + count] for start, count in prefix_chunks(latents.shape[2], block)]


class _Timeline:
    """Where a block stands in the cache, and the clean latents a recache, a rebuild or a restart needs."""

    def __init__(self, plan: BlockwisePlan) -> None:
        self.plan = plan
        self.offset = 0
        restart = plan.restart
        self.limit = max(plan.recache_frames or 0, restart.context_frames - 1 if restart else 0)
        prefix = plan.noise[:, :, :0] if plan.prefix is None else plan.prefix
        self.recent = prefix[:, :, -self.limit or prefix.shape[2]:]
        self.first = prefix[:, :, :1] if prefix.shape[2] else None
        self.chunks = [chunk.cpu() for chunk in in_chunks(prefix, plan.block)] if plan.rebuild else []
        self.prompt_frame = max(0, plan.prefix_frames - 1)

    def add(self, block: Block, latent: torch.Tensor) -> None:
        self.prompt_frame = block.start
        if self.first is None:
            self.first = latent[:, :, :1]
        if self.limit:
            self.recent = torch.cat([self.recent.to(latent.device), latent], dim=2)[:, :, -self.limit:]
        if self.plan.rebuild:
            self.chunks.append(latent.cpu())

    def is_full(self, block: Block) -> bool:
        restart = self.plan.restart
        return restart is not None and block.start - self.offset + block.num_frames > restart.rollout_frames

    def restart(self, call: ModelCall, block: Block) -> None:
        """Refills the cache from the context frames, which become frames 0 .. n - 1, under the prompt of the block before."""
        rule = self.plan.restart
        assert rule is not None
        anchor = self._anchor(rule, block).to(self.recent)
        later = self.recent[:, :, 1 - rule.context_frames:] if rule.context_frames > 1 else self.recent[:, :, :0]
        context = in_chunks(torch.cat([anchor, later], dim=2), self.plan.block)
        self.chunks = [chunk.cpu() for chunk in context] if self.plan.rebuild else []
        prefill(call, self.plan, context, self.prompt_frame)
        self.offset = block.start - rule.context_frames

    def _anchor(self, rule: Restart, block: Block) -> torch.Tensor:
        assert self.first is not None
        if rule.keep_first or (block.index - 1) * self.plan.block < rule.context_frames:
            return self.first
        if rule.anchor is None:
            raise ConfigError("this preset encodes a decoded frame again when its timeline restarts, which needs the VAE; use the "
                              "FAST-AR Streaming Sampler node with its vae input connected")
        return rule.anchor(rule.anchor_pixel_from_end)

    def num_switch_calls(self, block: Block) -> int:
        """Model calls of a prompt switch before ``block``."""
        plan, at = self.plan, block.start - self.offset
        if not at:
            return 0
        if not plan.rebuild:
            return int(bool(plan.recache_frames))
        given = plan.restart.context_frames if self.offset and plan.restart is not None else plan.prefix_frames
        return len(prefix_chunks(given, plan.block)) + len(prefix_chunks(at - given, plan.block))

    def switch_prompt(self, call: ModelCall, block: Block) -> None:
        """Brings the cache to the prompt of ``block``."""
        plan = self.plan
        if plan.rebuild:
            prefill(call, plan, self.chunks, block.start)
        elif plan.recache_frames and block.start:
            at = block.start - self.offset
            count = min(plan.recache_frames, at - bool(self.offset))  # an anchor stays as it is
            ctx = plan.context("recache", at - count, count, 0.0, 0.0, 0, block.index, block.start)
            call(self.recent[:, :, -count:], ctx)


def _denoise(call: ModelCall, plan: BlockwisePlan, block: Block, offset: int) -> torch.Tensor:
    x = plan.noise[:, :, block.start:block.start + block.num_frames]
    steps = plan.schedule.for_block(block.index)
    solver = plan.make_solver(block)
    for i, (sigma, timestep) in enumerate(steps):
        ctx = plan.context("denoise", block.start - offset, block.num_frames, sigma, timestep, i, block.index, block.start)
        x0 = call(x, ctx)
        if plan.on_step is not None:
            plan.on_step(block, i, len(steps), x0)
        x = solver.advance(solver.corrected(x.to(x0.device), x0, i), x0, i)
    return x


def run_blockwise(call: ModelCall, plan: BlockwisePlan) -> Iterator[BlockDone]:
    """Yields every finished block, before its clean pass: the caller may decode while nothing is pending."""
    if plan.prefix is not None:
        prefill(call, plan, in_chunks(plan.prefix, plan.block))
    timeline = _Timeline(plan)
    blocks = plan.blocks
    prompt = plan.prompt_at(0)
    for i, block in enumerate(blocks):
        if timeline.is_full(block):
            timeline.restart(call, block)
        following = plan.prompt_at(block.start)
        if following != prompt:
            timeline.switch_prompt(call, block)
        prompt = following
        latent = _denoise(call, plan, block, timeline.offset)
        timeline.add(block, latent)
        yield BlockDone(block, latent)
        if plan.clean_last or (i + 1 < len(blocks) and not timeline.is_full(blocks[i + 1])):
            start = block.start - timeline.offset
            call(latent, plan.context("clean", start, block.num_frames, 0.0, 0.0, 0, block.index, block.start))


def num_blockwise_calls(plan: BlockwisePlan) -> int:
    """Model calls of the whole run: prefill, denoise, clean, restart and recache passes."""
    timeline, blocks = _Timeline(plan), plan.blocks
    calls = plan.num_prefill_calls
    prompt = plan.prompt_at(0)
    for i, block in enumerate(blocks):
        if timeline.is_full(block) and plan.restart is not None:
            calls += len(prefix_chunks(plan.restart.context_frames, plan.block))
            timeline.offset = block.start - plan.restart.context_frames
        following = plan.prompt_at(block.start)
        calls += timeline.num_switch_calls(block) if following != prompt else 0
        prompt = following
        calls += len(plan.schedule.for_block(block.index))
        calls += plan.clean_last or (i + 1 < len(blocks) and not timeline.is_full(blocks[i + 1]))
    return calls
