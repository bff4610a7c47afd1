"""Write the demo's weight files and their model card from a training checkpoint. Run from the tests folder:

python -m demo.export --weights DIR/average.pt --gates gates.json --out ../example_workflows/models
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from demo import text, world
from demo.data import Bank
from demo.example_prompts import EXAMPLE_PROMPTS
from demo.model import DIM, FFN, HEADS, LAYERS, SIGMAS

DIT = Path("diffusion_models") / "fastar_demo_dit.safetensors"
PARTS = Path("fastar_demo")
NOTE = {
    "preliminary": "**Preliminary weights**: training goes on; figures below, where there are any, are those of this very file.\n\n",
    "final": "",
}


def _part(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value.bfloat16().contiguous() for name, value in weights.items() if name.startswith(prefix)}


def write_files(weights: dict[str, Tensor], bank: Bank, out: Path) -> None:
    """The diffusion model, text encoder, codec and slate."""
    (out / DIT).parent.mkdir(parents=True, exist_ok=True)
    (out / PARTS).mkdir(parents=True, exist_ok=True)
    config = {"transformer": {"causal_ar": True, "num_heads": HEADS, "text_dim": text.CONFIG["d_model"]}}
    family = {
        "family": "demo",
        "block": world.BLOCK,
        "shift": 5,
        "steps": len(SIGMAS),
        "raw_steps": [1000, 750, 500, 250],
        "fps": 16,
        "width": world.SIZE,
        "height": world.SIZE,
        "start": "slate",
    }
    save_file(_part(weights, "dit."), out / DIT, {"config": json.dumps(config), "fastar": json.dumps(family)})

    def described(**entries: Any) -> dict[str, str]:
        return {"fastar_demo": json.dumps(entries), "format": "pt"}

    save_file(
        _part(weights, "text."),
        out / PARTS / "fastar_demo_text.safetensors",
        described(part="text", config=text.CONFIG, words=list(bank.words)),
    )
    codec = {"mean": bank.codec.mean, "basis": bank.codec.basis, "scale": torch.tensor([bank.codec.scale])}
    save_file(codec, out / PARTS / "fastar_demo_vae.safetensors", described(part="vae"))
    save_file(
        {"slate": bank.slate[None, :, None].contiguous()},
        out / PARTS / "fastar_demo_slate.safetensors",
        described(part="slate"),
    )
    for file in (out / DIT, *(out / PARTS).iterdir()):
        file.chmod(0o644)


def _measured(gates: dict[str, Any] | None) -> str:
    return (
        f"{gates['seeds']} {METHOD}\n\n{_table(gates)}" if gates else "Not measured yet: run `python -m demo.gates` from the tests folder."
    )


def _table(gates: dict[str, Any]) -> str:
    lines = ["| gate | value | 95 % interval | target | holds |", "|---|---|---|---|---|"]
    for row in gates["rows"]:
        lines.append(
            f"| {row['gate']} | {row['value']} | {row['low']} to {row['high']} | {row['target']} | {'yes' if row['holds'] else 'no'} |"
        )
    return "\n".join(lines)


def _examples() -> str:
    parts = []
    for name, lines in EXAMPLE_PROMPTS.items():
        listed = "\n".join(f"{max(0, 4 * frame - 3)}: {line}" for frame, line in lines)
        parts.append(f"`{name}`\n\n```\n{listed}\n```")
    return "\n\n".join(parts)


METHOD = """held-out seeds, `python -m demo.gates`; rates with Wilson intervals. A landmark counts as right when the
nearest of all 1152 scenes has its colour and its shape. "window 9": nine latent frames with the block itself, no
sink. "history removed": the block that returns sees the slate and itself."""

CARD = """# FAST-AR demo models

A tiny streaming video model for trying and testing the pack offline on a CPU. It draws one small made-up world and
nothing else. Trained from scratch by the code in `tests/demo/`; no outside data, weights or text went into it.

{note}| file | what |
|---|---|
| `diffusion_models/fastar_demo_dit.safetensors` | {params:.2f} M parameters, Wan layout: {sizes} |
| `fastar_demo/fastar_demo_text.safetensors` | UMT5 text encoder, one layer, whole words, with its {words} words |
| `fastar_demo/fastar_demo_vae.safetensors` | linear PCA codec, 4x8x8x3 pixels to 16 channels |
| `fastar_demo/fastar_demo_slate.safetensors` | the slate: the fixed first latent frame of every text-to-video clip |

Trained for {minutes:.0f} minutes ({steps} steps) on two shared CPU cores, seed 1. The stage plan was tuned while the run was
going on (grammar, batches, and the interventions in `tests/demo/name_search.py`), so `demo.train` follows the same
path but does not give these very bytes. Licence: Apache-2.0, as the pack.

## How to run it

128 x 128 pixels, 16 frames per second, three latent frames per block, four steps at sigma 1, 0.9375, 0.8333, 0.625
(shift 5), cfg 1, fresh noise between steps, clean pass at t = 0: the Self-Forcing recipe. A text-to-video clip
starts with the slate as a one-latent prefix (its first picture shows coloured squares: that is what tells the model
left from right); an image-to-video clip starts with a picture of a place instead. So block borders lie at latent
frames 1, 4, 7, ...

## What it can be told

One sentence per block; a sentence holds until the next one. Anything before or after it is ignored by design, so
clauses that name far places make a prompt longer without changing the picture ("{fillers} <far place>").

- `at <place> with <ground> <texture> ground and a <colour> <shape>`: a place is shown for the first time (a cut)
- `to <place> with <ground> <texture> ground and a <colour> <shape>`: the camera slides to a new place within one
  block
- `at <place>`: the camera stays, or cuts back to a place shown before
- `to <place>`: the camera slides back to a place shown before

Looks are named once, when a place is first shown. Coming back, the model must find them in its history: with a
short window it cannot know them. Give two places of one clip different landmarks.

- places: {names}
- far places: {far}
- grounds: {grounds}
- textures: {textures}
- colours: {colours}
- shapes: {shapes}

## Ready prompt lists

For the node "FAST-AR Prompts", `frame: text` (frames of the video). Each fits 61 latent frames (241 frames) unless it ends
earlier. The last one is for image-to-video.

{examples}

## Measured

{measured}
"""


def write_card(checkpoint: dict[str, Any], bank: Bank, gates: dict[str, Any] | None, out: Path, state: str) -> None:
    """MODEL_CARD.md with the figures of `gates`."""
    params = sum(v.numel() for k, v in checkpoint["weights"].items() if k.startswith("dit.")) / 1e6
    fillers = '", "'.join(" ".join(words) for words in world.FILLERS)
    card = CARD.format(
        note=NOTE[state],
        sizes=f"width {DIM}, {LAYERS} layers, {HEADS} heads, feed-forward {FFN}, bf16",
        params=params,
        words=len(bank.words),
        minutes=checkpoint["minutes"],
        steps=checkpoint["steps"],
        fillers=fillers,
        names=", ".join(world.NAMES),
        far=", ".join(world.FAR),
        grounds=", ".join(world.GROUNDS),
        textures=", ".join(world.TEXTURES),
        colours=", ".join(world.COLOURS),
        shapes=", ".join(world.SHAPES),
        examples=_examples(),
        measured=_measured(gates),
    )
    (out / "MODEL_CARD.md").write_text(card, encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="average.pt of a training run")
    parser.add_argument("--gates", type=Path, help="JSON that demo.gates wrote for these weights")
    parser.add_argument("--out", type=Path, required=True, help="example_workflows/models")
    parser.add_argument("--state", choices=sorted(NOTE), default="final")
    options = parser.parse_args()
    checkpoint = torch.load(options.weights, weights_only=True)
    bank = Bank()
    write_files(checkpoint["weights"], bank, options.out)
    gates = json.loads(options.gates.read_text(encoding="utf-8")) if options.gates else None
    write_card(checkpoint, bank, gates, options.out, options.state)


if __name__ == "__main__":
    main()
