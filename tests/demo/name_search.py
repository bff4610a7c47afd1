"""Interventions of the shipped run that let the search by name form: heads that read names, names apart, a matching head.

Text to picture was learned within minutes; finding an old place by its name was not, since almost all cross-attention
stays on the padding and what is read of a name is faint beside the rest. Each step below is done once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from demo import text, world
from demo.model import DIM, HEADS
from tiny import wan_plain

HEAD = DIM // HEADS
CODE = 48
READ_LAYER, MATCH_LAYERS = 0, (2, 3)


@torch.no_grad()
def quiet_name_heads(params: dict[str, Tensor], layers: tuple[int, ...]) -> None:
    """Before the heads that are to read names turn to them: weaken what they write, which was meant for faint rows."""
    for layer in layers:
        params[f"dit.blocks.{layer}.cross_attn.o.weight"][:, HEAD:] *= 0.1


@torch.no_grad()
def set_names_apart(params: dict[str, Tensor], words: dict[str, int]) -> None:
    """Let each name's own embedding outweigh what attention adds to it, so that no two names look alike."""
    params["text.shared.weight"][[words[name] for name in world.NAMES]] *= 10


def _name_rows(params: dict[str, Tensor], words: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Embedded rows [N, DIM] of all names after "at" and after "to", and which name each is."""
    parts = {p: {k[len(p) :]: v for k, v in params.items() if k.startswith(p)} for p in ("text.", "dit.")}
    rows, owners = [], []
    other = {name: world.NAMES[number - 1] for number, name in enumerate(world.NAMES)}
    for pattern in ("at {0}", "from {1} to {0}"):
        prompts = [pattern.format(name, other[name]) for name in world.NAMES]
        ids = text.batch_ids(prompts, words)
        encoded = wan_plain.embed_text(parts["dit."], text.encode(parts["text."], ids))
        column = len(prompts[0].split()) - 1
        rows.append(encoded[:, column])
        owners.append(torch.arange(len(world.NAMES)))
    return torch.cat(rows), torch.cat(owners)


@torch.no_grad()
def implant_match(params: dict[str, Tensor], words: dict[str, int], write: float, look: float) -> None:
    """Head 1 of the first cross-attention writes a code of the name it reads, head 0 of the middle layers compares codes.

    write: length of the code in the residual stream; look: gain of the comparison.
    """
    g = torch.Generator().manual_seed(3)
    rows, owners = _name_rows(params, words)
    codes = F.normalize(torch.randn(len(world.NAMES), CODE, generator=g), dim=1)[owners]
    middle = rows.mean(0)
    centred = rows - middle
    ridge = 0.01 * centred.square().sum() / len(rows) * torch.eye(DIM)
    to_code = torch.linalg.solve(centred.T @ centred + ridge, centred.T @ codes).T  # [CODE, DIM]
    busy = torch.cat((params["dit.patch_embedding.weight"].flatten(1), params["dit.head.head.weight"].T), 1)
    basis = torch.linalg.qr(busy).Q
    free = torch.randn(DIM, CODE, generator=g)
    space = torch.linalg.qr(free - basis @ (basis.T @ free)).Q  # [DIM, CODE]
    name = f"dit.blocks.{READ_LAYER}.cross_attn"
    chosen = slice(HEAD, HEAD + CODE)
    params[f"{name}.v.weight"][chosen] = to_code
    params[f"{name}.v.bias"][chosen] = -(to_code @ middle)
    params[f"{name}.o.weight"][:, HEAD:] = 0
    params[f"{name}.o.weight"][:, chosen] = write * space
    frame, rows_width, _ = wan_plain.rope_axes(HEAD)
    slow = torch.cat((torch.arange(frame + 18, frame + rows_width), torch.arange(frame + rows_width + 18, HEAD)))[:CODE]
    for name in (f"dit.blocks.{layer}.self_attn" for layer in MATCH_LAYERS):
        for kind in "qk":
            params[f"{name}.{kind}.weight"][slow] = look * space.T
            params[f"{name}.{kind}.bias"][slow] = 0
            params[f"{name}.norm_{kind}.weight"][slow] = 1
