"""Interventions of the shipped run that let the search by name form, each done once at the step named in train.py.

Text to picture was learned within minutes; finding an old place by its name was not: almost all cross-attention stayed
on the padding, and what was read of a name was faint beside the rest and nearly the same for all names. So one head is
made to read the name, to write a code of it, and the heads that already looked up the same token in the past compare
these codes. Training goes on from there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from demo import text, world
from demo.model import DIM, HEADS
from tiny import wan_plain

HEAD = DIM // HEADS
CODE = 48
READER = "dit.blocks.0.cross_attn"
MATCH_LAYERS = (2, 3, 4)
SHARP = 20.0  # length of the reading query after its norm
LENGTH = 36.0  # length of the other head's query before the norm, as measured


@torch.no_grad()
def quiet_name_heads(params: dict[str, Tensor], layers: tuple[int, ...]) -> None:
    """Before the heads that are to read names turn to them: weaken what they write, which was meant for faint rows."""
    for layer in layers:
        params[f"dit.blocks.{layer}.cross_attn.o.weight"][:, HEAD:] *= 0.1


@torch.no_grad()
def set_names_apart(params: dict[str, Tensor], words: dict[str, int], names: tuple[str, ...], factor: float) -> None:
    """Let each name's own embedding outweigh what attention adds to it, so that no two names look alike."""
    params["text.shared.weight"][[words[name] for name in names]] *= factor


@dataclass
class Samples:
    """Prompts of the world: embedded rows [N, L, DIM], padding bias [N, L], the name's row [N] and number [N]."""

    rows: Tensor
    bias: Tensor
    at: Tensor
    name: Tensor


@torch.no_grad()
def sample_prompts(params: dict[str, Tensor], words: dict[str, int], count: int) -> Samples:
    """Embed `count` prompts with the current text weights."""
    rng, prompts, names = random.Random(1), [], []
    for _ in range(count):
        _, blocks = world.draw_clip(rng, 4, fillers=rng.choice((0, 0, 1, 2, 3)), fresh=2, new=0.2)
        block = rng.choice(blocks[1:])
        prompts.append(block.prompt)
        names.append(block.name)
    parts = {p: {k[len(p) :]: v for k, v in params.items() if k.startswith(p)} for p in ("text.", "dit.")}
    ids = text.batch_ids(prompts, words)
    rows = wan_plain.embed_text(parts["dit."], text.encode(parts["text."], ids))
    at = torch.tensor([prompt.split().index(name) for prompt, name in zip(prompts, names)])
    return Samples(rows, text.pad_bias(ids), at, torch.tensor([world.NAMES.index(name) for name in names]))


def fit_reader(params: dict[str, Tensor], samples: Samples, steps: int = 40) -> None:
    """Head 1 of the reading layer gets a constant query and keys such that its weight lies on the name's row."""
    weight, bias = params[READER + ".k.weight"].detach(), params[READER + ".k.bias"].detach()
    query = torch.randn(HEAD, generator=torch.Generator().manual_seed(0)).requires_grad_()
    own, own_bias = weight[HEAD:].clone().requires_grad_(), bias[HEAD:].clone().requires_grad_()
    groups = [{"params": [query], "lr": 0.06}, {"params": [own, own_bias], "lr": 8e-3}]
    optimizer = torch.optim.Adam(groups)
    for step in range(steps):
        pick = torch.randint(0, len(samples.at), (32,), generator=torch.Generator().manual_seed(step))
        k = F.linear(samples.rows[pick], torch.cat((weight[:HEAD], own)), torch.cat((bias[:HEAD], own_bias)))
        k = F.rms_norm(k, (DIM,), params[READER + ".norm_k.weight"].detach(), wan_plain.EPS)[..., HEAD:]
        score = k @ (F.normalize(query, dim=0) * SHARP) / HEAD**0.5 + samples.bias[pick]
        optimizer.zero_grad()
        F.cross_entropy(score, samples.at[pick]).backward()
        optimizer.step()
    with torch.no_grad():
        params[READER + ".k.weight"][HEAD:], params[READER + ".k.bias"][HEAD:] = own, own_bias
        params[READER + ".q.weight"][HEAD:] = 0
        params[READER + ".q.bias"][HEAD:] = F.normalize(query, dim=0) * LENGTH
        params[READER + ".norm_q.weight"][HEAD:] = SHARP / HEAD**0.5


@torch.no_grad()
def write_codes(params: dict[str, Tensor], samples: Samples, write: float) -> Tensor:
    """The reading head writes a code of length `write` for each name; returns where it lies in the stream [DIM, CODE]."""
    g = torch.Generator().manual_seed(3)
    codes = F.normalize(torch.randn(len(world.NAMES), CODE, generator=g), dim=1)[samples.name]
    rows = samples.rows[torch.arange(len(samples.at)), samples.at]
    middle = rows.mean(0)
    centred = rows - middle
    ridge = 1e-3 * centred.square().sum() / len(rows) * torch.eye(DIM)
    to_code = torch.linalg.solve(centred.T @ centred + ridge, centred.T @ codes).T
    busy = torch.cat((params["dit.patch_embedding.weight"].flatten(1), params["dit.head.head.weight"].T), 1)
    basis = torch.linalg.qr(busy).Q
    free = torch.randn(DIM, CODE, generator=torch.Generator().manual_seed(4))
    space = torch.linalg.qr(free - basis @ (basis.T @ free)).Q
    chosen = slice(HEAD, HEAD + CODE)
    params[READER + ".v.weight"][chosen] = to_code
    params[READER + ".v.bias"][chosen] = -(to_code @ middle)
    params[READER + ".o.weight"][:, HEAD:] = 0
    params[READER + ".o.weight"][:, chosen] = write * space
    return space


@torch.no_grad()
def implant_match(params: dict[str, Tensor], words: dict[str, int], write: float = 150.0, look: float = 5.0) -> None:
    """Names are read, coded and compared: head 0 of the later layers compares codes on its slow row and column pairs."""
    samples = sample_prompts(params, words, 600)
    with torch.enable_grad():
        fit_reader(params, samples)
    space = write_codes(params, samples, write)
    frame, width, _ = wan_plain.rope_axes(HEAD)
    slow = torch.cat((torch.arange(frame + 18, frame + width), torch.arange(frame + width + 18, HEAD)))[:CODE]
    for name in (f"dit.blocks.{layer}.self_attn" for layer in MATCH_LAYERS):
        for kind in "qk":
            params[f"{name}.{kind}.weight"][slow] = look * space.T
            params[f"{name}.{kind}.bias"][slow] = 0
            params[f"{name}.norm_{kind}.weight"][slow] = 1
