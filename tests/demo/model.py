"""The demo's Wan weights and its teacher-forced forward: [start latent | clean blocks | noisy blocks] in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.world import BLOCK
from tiny import wan_plain

DIM, HEADS, LAYERS, FFN, CHANNELS, GRID = 256, 2, 5, 512, 16, 8
FRAME = GRID * GRID
TEXT_DIM = 4096
Pair = tuple[Tensor, Tensor]
SIGMAS = (1.0, 0.9375, 5 / 6, 0.625)


def _spatial_prior(weights: dict[str, Tensor], layer: int, sharp: float) -> None:
    """Head 0 starts by attending to its own place in every frame: equal biases on fast row and column pairs."""
    name = f"blocks.{layer}.self_attn"
    frame, rows, _ = wan_plain.rope_axes(DIM // HEADS)
    for start in (frame, frame + rows):
        fast = torch.arange(start, start + 16, 2)
        for kind in "qk":
            weights[f"{name}.{kind}.bias"][fast] = 4.0
            weights[f"{name}.norm_{kind}.weight"][fast] = sharp


def init_model(seed: int) -> dict[str, Tensor]:
    """Fresh fp32 weights: the input noise reaches the head at once, query and key projections start equal."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=g) * std

    patch = torch.linalg.qr(normal(DIM, CHANNELS * 4, std=1.0)).Q
    out_rows = patch.T.reshape(CHANNELS, 4, DIM).permute(1, 0, 2).reshape(CHANNELS * 4, DIM)
    w = {
        "patch_embedding.weight": patch.reshape(DIM, CHANNELS, 1, 2, 2).clone(),
        "patch_embedding.bias": torch.zeros(DIM),
        "head.head.weight": out_rows * 0.5,
        "head.head.bias": torch.zeros(CHANNELS * 4),
        "head.modulation": torch.zeros(1, 2, DIM),
    }
    sizes = {
        "text_embedding.0": (DIM, TEXT_DIM),
        "text_embedding.2": (DIM, DIM),
        "time_embedding.0": (DIM, 256),
        "time_embedding.2": (DIM, DIM),
        "time_projection.1": (6 * DIM, DIM),
    }
    for layer in range(LAYERS):
        name = f"blocks.{layer}"
        for part in ("self_attn", "cross_attn"):
            sizes |= {f"{name}.{part}.{kind}": (DIM, DIM) for kind in "qkvo"}
            w |= {f"{name}.{part}.norm_{kind}.weight": torch.ones(DIM) for kind in "qk"}
        sizes |= {f"{name}.ffn.0": (FFN, DIM), f"{name}.ffn.2": (DIM, FFN)}
        w |= {f"{name}.norm3.weight": torch.ones(DIM), f"{name}.norm3.bias": torch.zeros(DIM)}
        w[f"{name}.modulation"] = torch.zeros(1, 6, DIM)
        w[f"{name}.modulation"][:, (2, 5)] = 1.0
    for name, shape in sizes.items():
        small = name.endswith((".o", "ffn.2")) or name == "time_projection.1"
        w[name + ".weight"] = normal(*shape, std=(0.3 if small else 1.0) / shape[1] ** 0.5)
        w[name + ".bias"] = torch.zeros(shape[0])
    for layer in range(LAYERS):
        w[f"blocks.{layer}.self_attn.k.weight"] = w[f"blocks.{layer}.self_attn.q.weight"].clone()
        _spatial_prior(w, layer, 2.0 if layer % 2 == 0 else 1.3)
    return w


def half_split(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same model with each head's q and k channels ordered (even, odd): rotation then works on whole halves."""
    order = torch.arange(DIM).reshape(HEADS, -1, 2).transpose(1, 2).flatten()
    ends = tuple(f"self_attn.{n}" for n in ("q.weight", "q.bias", "k.weight", "k.bias", "norm_q.weight", "norm_k.weight"))
    return {name: value[order] if name.endswith(ends) else value for name, value in weights.items()}


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """q [N, n, d] (scaled already), k [N, m, d], bias [N, 1, m]; plain products are fastest in bf16 on CPUs."""
    score = torch.bmm(q, k.transpose(1, 2))
    return (score if bias is None else score + bias).softmax(-1)


class Guide:
    """Two hints that make the search by name form within minutes, each the mean of -log(weight in the right place).

    Head 1 of the first cross-attentions: read the row of the name that the prompt is about. Head 0 of the middle
    self-attentions: look at the same token in the frames of that place.
    """

    read_layers = (0, 1)
    look_layers = (2, 3)

    def __init__(self, places: Tensor, names: Tensor, first: int) -> None:
        """places [B, frames]: place that each latent frame of the clip shows in full, -1 for none; names [B, blocks]:
        text row of the name; first: number of the block with which the pass begins.
        """
        self.places, self.names, self.first = places, names, first
        self.total, self.count = torch.zeros(()), 0
        self.read, self.reads = torch.zeros(()), 0

    def add(self, weights: Tensor, block: int) -> None:
        """Self-attention weights [B*heads, 192, keys] of a noisy block whose last 192 keys are its own."""
        batch, at = len(self.places), 1 + BLOCK * (self.first + block)
        seen = weights.shape[-1] // FRAME - BLOCK
        head = weights.unflatten(0, (batch, -1))[:, 0, :, : seen * FRAME].float()
        same = head.reshape(batch, BLOCK, FRAME, seen, FRAME).diagonal(dim1=2, dim2=4)
        shown = self.places[:, at : at + BLOCK]
        match = self.places[:, :seen] == shown[:, -1:]
        mass = (same * match[:, None, :, None]).sum(2)
        use = match.any(1, keepdim=True) & (shown == shown[:, -1:])
        self.total = self.total - ((mass + 1e-4).log().mean(-1) * use).sum()
        self.count += int(use.sum())

    def add_name(self, weights: Tensor, block: int) -> None:
        """Cross-attention weights [B*heads, tokens, rows] of a chunk that belongs to `block`."""
        head = weights.unflatten(0, (len(self.names), -1))[:, 1].float()
        rows = self.names[:, self.first + block]
        mass = head.gather(2, rows[:, None, None].expand(-1, head.shape[1], 1))
        self.read = self.read - (mass + 1e-4).log().mean()
        self.reads += 1

    def mean(self) -> Tensor:
        """Both hints [2]: look, read."""
        return torch.stack((self.total / max(1, self.count), self.read / max(1, self.reads)))


@dataclass
class Layout:
    """Where the tokens of one teacher-forced pass stand.

    starts: first latent frame of each block; lead: the start latent stands in front, at frame `origin`; learn: number
    of the first block that is denoised, those before are history; history: a pass of clean blocks alone.
    """

    starts: Sequence[int]
    learn: int = 0
    origin: int = 0
    lead: bool = True
    history: bool = False

    def clean(self) -> int:
        """Number of blocks with a clean copy: all, but for the last block of a pass that denoises."""
        return len(self.starts) - (not self.history)

    def clean_frames(self) -> int:
        return BLOCK * self.clean() + self.lead

    def owners(self) -> list[int]:
        """Block number of every chunk of tokens: start latent (0), clean blocks, noisy blocks."""
        noisy = [] if self.history else list(range(self.learn, len(self.starts)))
        return [0] * self.lead + list(range(self.clean())) + noisy

    def sizes(self) -> list[int]:
        """Tokens of every chunk."""
        return [FRAME] * self.lead + [BLOCK * FRAME] * (len(self.owners()) - self.lead)

    def positions(self) -> Tensor:
        """[tokens, 3]."""
        lead = [wan_plain.grid_positions(1, GRID, GRID, self.origin)] if self.lead else []
        rest = self.owners()[self.lead :]
        return torch.cat(lead + [wan_plain.grid_positions(BLOCK, GRID, GRID, self.starts[n]) for n in rest])


class TeacherForced:
    """Attention of one pass: clean blocks see earlier clean blocks and themselves, noisy blocks earlier clean ones."""

    def __init__(
        self,
        layout: Layout,
        text_bias: Tensor,
        dtype: torch.dtype,
        past: Sequence[Pair] | None = None,
        guide: Guide | None = None,
    ) -> None:
        """text_bias [B, blocks, L] for the prompts of all blocks; past: (k, v) of every layer, seen by all."""
        cos, sin = wan_plain.rope_table(layout.positions(), DIM // HEADS)
        self.cos, self.sin = cos.to(dtype), sin.to(dtype)
        self.layout, self.past = layout, past
        self.bias = text_bias.to(dtype).repeat_interleave(HEADS, 0).unsqueeze(2)
        self.kept: list[Pair] = []
        self.guide = guide

    def _rotate(self, x: Tensor) -> Tensor:
        even, odd = x.chunk(2, -1)
        return torch.cat((even * self.cos - odd * self.sin, even * self.sin + odd * self.cos), -1)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch = len(q)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q * q.shape[-1] ** -0.5, k, v))
        k = self._rotate(k)
        qs, ks, vs = (list(x.split(self.layout.sizes(), 1)) for x in (self._rotate(q), k, v))
        clean = self.layout.clean() + self.layout.lead
        self.kept.append((k, v))
        front = [self.past[layer]] if self.past else []
        seen_k, seen_v = [pair[0] for pair in front], [pair[1] for pair in front]
        base = len(seen_k)
        seen_k, seen_v = seen_k + ks[:clean], seen_v + vs[:clean]
        out = []
        for number, owner in enumerate(self.layout.owners()):
            end = base + self.layout.lead + owner
            if number < clean:
                end = base + number
            own_k, own_v = (torch.cat((*seen[:end], own[number]), 1) for seen, own in ((seen_k, ks), (seen_v, vs)))
            weights = attention_weights(qs[number], own_k)
            if self.guide and layer in self.guide.look_layers and number >= clean:
                self.guide.add(weights, owner)
            out.append(torch.bmm(weights, own_v))
        return torch.cat(out, 1).unflatten(0, (batch, -1)).transpose(1, 2)

    def cross(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch = len(q)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q * q.shape[-1] ** -0.5, k, v))
        ks, vs = (x.chunk(len(self.layout.starts), 1) for x in (k, v))
        out = []
        for owner, part in zip(self.layout.owners(), q.split(self.layout.sizes(), 1), strict=True):
            weights = attention_weights(part, ks[owner], self.bias[:, owner])
            if self.guide and layer in self.guide.read_layers:
                self.guide.add_name(weights, owner)
            out.append(torch.bmm(weights, vs[owner]))
        return torch.cat(out, 1).unflatten(0, (batch, -1)).transpose(1, 2)


def teacher_forced(
    weights: Mapping[str, Tensor],
    layout: Layout,
    clean: Tensor,
    noisy: Tensor,
    sigma: Tensor,
    text: Tensor,
    text_bias: Tensor,
    past: Sequence[Pair] | None = None,
    guide: Guide | None = None,
) -> Tensor:
    """Velocity of the noisy blocks [B, C, 3*n, 16, 16].

    clean [B, C, clean frames, 16, 16], noisy [B, C, 3*n, 16, 16] for the n denoised blocks, sigma [B, n],
    text [B, blocks, L, 4096] with bias [B, blocks, L], past as `history_keys` returns it.
    """
    plan = TeacherForced(layout, text_bias, noisy.dtype, past, guide)
    frames = layout.clean_frames()
    t = torch.cat((sigma.new_zeros(len(sigma), frames), sigma.repeat_interleave(BLOCK, 1) * 1000), 1)
    v = wan_plain.wan_forward(
        half_split(weights),
        torch.cat((clean, noisy), 2),
        t,
        text.flatten(1, 2),
        num_heads=HEADS,
        attend=plan.attend,
        cross=plan.cross,
    )
    return v[:, :, frames:]


@torch.no_grad()
def history_keys(weights: Mapping[str, Tensor], layout: Layout, clean: Tensor, text: Tensor, text_bias: Tensor) -> list[Pair]:
    """(k, v) of every layer, rotated, after a pass over clean blocks alone; arguments as in `teacher_forced`."""
    plan = TeacherForced(layout, text_bias, clean.dtype)
    wan_plain.wan_forward(
        half_split(weights),
        clean,
        torch.zeros(clean.shape[0], clean.shape[2]),
        text.flatten(1, 2),
        num_heads=HEADS,
        attend=plan.attend,
        cross=plan.cross,
    )
    return plan.kept


def velocity_error(v: Tensor, noise: Tensor, target: Tensor) -> Tensor:
    """Mean squared velocity error per block [B, n]; v, noise, target [B, C, 3*n, h, w]."""
    error = F.mse_loss(v.float(), noise - target, reduction="none")
    return error.unflatten(2, (-1, BLOCK)).mean((1, 3, 4, 5))
