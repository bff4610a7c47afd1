"""Batches of clips in latent space. The codec is linear and the camera moves by whole tokens, so a clip is a gather."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from demo import codec, text, world
from demo.model import SIGMAS, Layout
from demo.world import BLOCK

SHIPPED = Path(__file__).resolve().parents[2] / "example_workflows/models/fastar_demo/fastar_demo_vae.safetensors"
KINDS = ("new", "stay", "back", "slide_new", "slide_back")
SIGMA_ODDS = (0.4, 0.2, 0.2, 0.2)


def fit_codec(pictures: Tensor) -> codec.Codec:
    """The codec of 150 of the pictures [N, H, W, 3] (without light), always the same ones."""
    pick = torch.randperm(len(pictures), generator=torch.Generator().manual_seed(0))[:150]
    return codec.fit(pictures[pick] + world.light())


def shipped_codec() -> codec.Codec:
    """The codec that came with the weights: signs of principal axes are arbitrary, so a new fit need not match them."""
    tensors = load_file(SHIPPED)
    return codec.Codec(tensors["mean"], tensors["basis"], float(tensors["scale"]))


class Bank:
    """Latents of all looks without the camera's light, the light itself, and the slate every text clip starts with."""

    def __init__(self) -> None:
        pictures = torch.stack([world.render(look) for look in world.all_looks()])
        self.codec = shipped_codec() if SHIPPED.exists() else fit_codec(pictures)
        self.scenes = torch.stack([self.codec.still(picture) for picture in pictures])
        self.light = self.codec.still(world.light()) - self.codec.still(torch.zeros_like(world.light()))
        self.slate = make_slate()
        self.words = text.word_index(world.vocabulary())

    def frames(self, block: world.Block) -> Tensor:
        """Latent frames [16, 3, 16, 16] of a block."""
        left, right = self.scenes[block.left.index()], self.scenes[block.right.index()]
        wide = torch.cat((left, right), -1)
        return torch.stack([wide[..., 2 * s : 2 * s + 16] + self.light for s in block.shifts()], 1)

    def scene(self, look: world.Look) -> Tensor:
        """One still latent frame [16, 16, 16]."""
        return self.scenes[look.index()] + self.light


def make_slate() -> Tensor:
    """Start latent [16, 16, 16] of text clips: 64 tokens that are orthogonal to each other, so each names its place."""
    g = torch.Generator().manual_seed(7)
    tokens = torch.linalg.qr(torch.randn(64, 64, generator=g)).Q * 8
    return tokens.reshape(8, 8, 16, 2, 2).permute(2, 0, 3, 1, 4).reshape(16, 16, 16).contiguous()


@dataclass
class Batch:
    """clean [B,16,1+3(n-1),16,16], target [B,16,3m,16,16], sigma [B,m], ids [B*n,L], kind [B,m], places [B,1+3n]."""

    layout: Layout
    clean: Tensor
    target: Tensor
    sigma: Tensor
    ids: Tensor
    kind: Tensor
    places: Tensor
    names: Tensor


@dataclass(frozen=True)
class Recipe:
    """One kind of batch: clips, blocks per clip, first denoised block, chance of a time gap, filler clauses, and what
    `world.draw_clip` asks for; grad: whether the gradient reaches the blocks before the first denoised one.
    """

    clips: int
    blocks: int
    learn: int = 0
    gap: float = 0.0
    fillers: tuple[int, ...] = (0,)
    image: float = 0.2
    fresh: int = 1
    new: float = 0.3
    slide: float = 0.6
    grad: bool = True


def _starts(rng: random.Random, recipe: Recipe) -> tuple[list[int], tuple[int, ...]]:
    starts, at, gaps = [], 1, ()
    if recipe.blocks > 2 and rng.random() < recipe.gap:
        gaps = (rng.randint(2, recipe.blocks - 1),)
    for number in range(recipe.blocks):
        at += rng.randint(9, 300) if number in gaps else 0
        starts.append(at)
        at += BLOCK
    return starts, gaps


def _places(image: bool, blocks: list[world.Block]) -> list[int]:
    """Number of the place that each latent frame shows in full; -1 for the slate and the half-way frame of a slide."""
    out = [world.NAMES.index(blocks[0].name) if image else -1]
    for block in blocks:
        out += [world.NAMES.index(block.name) if shift == world.SLIDE[-1] else -1 for shift in block.shifts()]
    return out


def draw_batch(bank: Bank, recipe: Recipe, seed: int) -> Batch:
    """A batch that depends on nothing but its recipe and seed."""
    rng = random.Random(seed)
    g = torch.Generator().manual_seed(seed)
    starts, gaps = _starts(rng, recipe)
    clean, target, prompts, kinds, places, names = [], [], [], [], [], []
    fillers = rng.choice(recipe.fillers)
    for _ in range(recipe.clips):
        image = rng.random() < recipe.image
        style = {"fresh": recipe.fresh, "new": recipe.new, "slide": recipe.slide}
        start, blocks = world.draw_clip(rng, recipe.blocks, gaps=gaps, image=image, fillers=fillers, **style)
        frames = torch.cat([bank.frames(block) for block in blocks], 1)
        first = bank.slate if start is None else bank.scene(start)
        clean.append(torch.cat((first[:, None], frames[:, :-BLOCK]), 1))
        target.append(frames[:, BLOCK * recipe.learn :])
        prompts += [block.prompt for block in blocks]
        names.append([block.prompt.split().index(block.name) for block in blocks])
        kinds.append([KINDS.index(block.kind) for block in blocks[recipe.learn :]])
        places.append(_places(start is not None, blocks))
    history = torch.stack(clean)
    level = torch.rand(recipe.clips, 1, 1, 1, 1, generator=g) * 0.12
    history[:, :, 1:] += level * torch.randn(history[:, :, 1:].shape, generator=g)
    kind = torch.tensor(kinds)
    odds = torch.tensor(SIGMA_ODDS)
    sigma = torch.tensor(SIGMAS)[torch.multinomial(odds, kind.numel(), True, generator=g)].reshape(kind.shape)
    return Batch(
        Layout(starts, recipe.learn),
        history,
        torch.stack(target),
        sigma,
        text.batch_ids(prompts, bank.words),
        kind,
        torch.tensor(places),
        torch.tensor(names),
    )
