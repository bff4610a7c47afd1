"""Train the demo's Wan model and its text encoder together. Resumable, seeded; run from the tests folder:

    python -m demo.train --out DIR --minutes 120 --threads 2

Stages: clips of two blocks; of three and five with returns and time gaps; long histories without gradient.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from demo import text, world
from demo.data import KINDS, Bank, Batch, Recipe, draw_batch
from demo.model import Guide, Layout, history_keys, init_model, teacher_forced, velocity_error
from demo.name_search import implant_match, quiet_name_heads, set_names_apart
from demo.optim import Optimizer
from demo.world import BLOCK

SHORT = Recipe(clips=12, blocks=2, fillers=(0, 0, 0, 1), new=0.7)
TRIPLE = Recipe(clips=8, blocks=3, gap=0.3, fillers=(0, 0, 0, 1, 2), fresh=2)
MATCH = Recipe(clips=5, blocks=5, learn=2, gap=0.4, fillers=(0, 0, 0, 1, 2), fresh=2, new=0.15)
MIDDLE = Recipe(clips=4, blocks=5, gap=0.5, fillers=(0, 0, 0, 1, 2, 3))
LONG = Recipe(clips=3, blocks=0, gap=0.7, fillers=(0, 0, 1, 2, 3, 8), fresh=3, new=0.2, grad=False)


def recipe_at(step: int) -> Recipe:
    """The stage plan: two blocks; three with returns; five; then also three after a history of 5 to 16 blocks."""
    if step < 300:
        return SHORT
    if step < 600:
        return TRIPLE if step % 4 else SHORT
    if step < 1200:
        return MATCH if step % 4 else MIDDLE
    history = 5 + step * 7 % 12
    return (MATCH, MIDDLE, MATCH, replace(LONG, blocks=history + 3, learn=history))[step % 4]


def hint_at(step: int) -> float:
    """Weight of the attention hint: while the search by name forms, then fading out."""
    return 0.1 * min(1.0, max(0.0, (1850 - step) / 300)) if step >= NAMES_FROM else 0.0


NAMES_FROM, NAMES_APART, NAMES_MATCH = 848, 1248, 1416


@torch.no_grad()
def intervene(step: int, optimizer: Optimizer, words: dict[str, int]) -> None:
    """What was done by hand in the shipped run, at the same steps."""
    params = optimizer.params
    if step == NAMES_FROM:
        quiet_name_heads(params, Guide.read_layers)
    if step == NAMES_APART:
        set_names_apart(params, words, world.VOCABULARY_NAMES, 10)
    if step == NAMES_MATCH:
        for name, value in optimizer.average.items():
            params[name].copy_(value)
        set_names_apart(params, words, world.NAMES, 5)
        implant_match(params, words)
        for name, value in params.items():
            optimizer.average[name].copy_(value)


def rates_at(step: int, done: float) -> tuple[float, float]:
    """(Muon, AdamW) learning rates: warm-up, constant, then linear decay over the last third of the run."""
    factor = min(1.0, (step + 1) / 60) * min(1.0, max(0.03, (1 - done) / 0.31))
    return 0.02 * factor, 2e-3 * factor


def is_matrix(name: str) -> bool:
    """Hidden matrices go to Muon."""
    return name.startswith("dit.blocks.") and name.endswith(
        (".q.weight", ".k.weight", ".v.weight", ".o.weight", "ffn.0.weight", "ffn.2.weight")
    )


def part(params: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors below a prefix, without it."""
    return {name[len(prefix) :]: value for name, value in params.items() if name.startswith(prefix)}


class Run:
    """Everything a training run owns, and its checkpoint."""

    def __init__(self, out: Path, seed: int) -> None:
        self.bank, self.seed, self.minutes = Bank(), seed, 0.0
        start = {f"dit.{k}": v for k, v in init_model(seed).items()}
        start |= {f"text.{k}": v for k, v in text.init_text(len(self.bank.words), seed).items()}
        self.params = {name: value.requires_grad_() for name, value in start.items()}
        rates = {name: 0.2 for name in self.params if name.startswith(("dit.text_embedding.0", "text.encoder"))}
        rates["text.shared.weight"] = 5.0
        self.optimizer = Optimizer(self.params, {n for n in self.params if is_matrix(n)}, rates)
        self.file = out / "resume.pt"
        if self.file.exists():
            self._load()

    def _load(self) -> None:
        saved = torch.load(self.file, weights_only=True)
        self.minutes, self.seed = saved["minutes"], saved["seed"]
        for name, value in saved["params"].items():
            self.params[name].data.copy_(value)
        self.optimizer.load_state_dict(saved["optimizer"])

    def save(self) -> None:
        """Write the resume file and the averaged weights, each in one step."""
        state = {
            "params": {k: v.detach() for k, v in self.params.items()},
            "optimizer": self.optimizer.state_dict(),
            "minutes": self.minutes,
            "seed": self.seed,
        }
        averages = {"weights": self.optimizer.average, "minutes": self.minutes, "steps": self.optimizer.steps}
        for file, value in ((self.file, state), (self.file.with_name("average.pt"), averages)):
            torch.save(value, file.with_suffix(".tmp"))
            file.with_suffix(".tmp").replace(file)

    def loss(self, batch: Batch, seed: int, grad: bool, hint: float) -> tuple[Tensor, Tensor, Tensor]:
        """Training loss, the error of the predicted clean latents per block [B, m], and the two hints."""
        low = {name: value.bfloat16() for name, value in self.params.items()}
        noise = torch.randn(batch.target.shape, generator=torch.Generator().manual_seed(seed)).bfloat16().float()
        level = batch.sigma.repeat_interleave(BLOCK, 1)[:, None, :, None, None]
        noisy = ((1 - level) * batch.target + level * noise).bfloat16()
        shape = (len(batch.target), len(batch.layout.starts))
        rows = text.encode(part(low, "text."), batch.ids).unflatten(0, shape)
        bias, clean = text.pad_bias(batch.ids).unflatten(0, shape), batch.clean.bfloat16()
        dit, layout, past, cut = part(low, "dit."), batch.layout, None, 0 if grad else batch.layout.learn
        if cut:
            before, frames = Layout(layout.starts[:cut], history=True), 1 + BLOCK * cut
            past = history_keys(dit, before, clean[:, :, :frames], rows[:, :cut].detach(), bias[:, :cut])
            layout, clean = Layout(layout.starts[cut:], lead=False), clean[:, :, frames:]
        guide = Guide(batch.places, batch.names, cut) if hint else None
        v = teacher_forced(dit, layout, clean, noisy, batch.sigma, rows[:, cut:], bias[:, cut:], past, guide)
        error = velocity_error(v, noise, batch.target)
        hinted = guide.mean() if guide else torch.zeros(2)
        return error.mean() + hint * hinted.sum(), error.detach() * batch.sigma**2, hinted.detach()


class Meter:
    """Mean PSNR of the clean prediction from pure noise per kind of block, and the loss."""

    def __init__(self) -> None:
        self.errors: dict[int, list[float]] = defaultdict(list)
        self.losses: list[float] = []
        self.hints: list[Tensor] = []

    def add(self, loss: Tensor, error: Tensor, hinted: Tensor, batch: Batch) -> None:
        self.losses.append(float(loss.detach()))
        self.hints.append(hinted)
        pure = batch.sigma == 1
        for kind, value in zip(batch.kind[pure].tolist(), error[pure].tolist(), strict=True):
            self.errors[kind].append(value)

    def line(self, run: Run) -> str:
        decibel = {KINDS[k]: float(run.bank.codec.decibel(torch.tensor(v)).mean()) for k, v in sorted(self.errors.items())}
        text_part = " ".join(f"{name} {value:.1f}" for name, value in decibel.items())
        self.errors.clear()
        loss = sum(self.losses) / len(self.losses)
        look, read = torch.stack(self.hints).mean(0).tolist()
        self.losses.clear()
        self.hints.clear()
        return f"loss {loss:.4f} look {look:.2f} read {read:.2f} | dB {text_part}"


def train(run: Run, minutes: float, total: float) -> None:
    """Train for `minutes` more; the learning rate falls towards `total` minutes."""
    meter, began, saved, shown = Meter(), time.time(), time.time(), time.time()
    before = run.minutes
    while run.minutes < before + minutes:
        step = run.optimizer.steps
        seed = run.seed * 1_000_003 + step
        recipe = recipe_at(step)
        intervene(step, run.optimizer, run.bank.words)
        batch = draw_batch(run.bank, recipe, seed)
        loss, error, hinted = run.loss(batch, seed, recipe.grad, hint_at(step))
        loss.backward()
        run.optimizer.step(*rates_at(step, run.minutes / total), decay=0.99)
        meter.add(loss, error, hinted, batch)
        run.minutes = before + (time.time() - began) / 60
        if time.time() - shown > 30:
            shown = time.time()
            print(f"{run.minutes:6.1f} min step {step} {meter.line(run)}", flush=True)
        if time.time() - saved > 180:
            saved = time.time()
            run.save()
    run.save()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the resume file")
    parser.add_argument("--minutes", type=float, default=60, help="how long to train now")
    parser.add_argument("--total", type=float, default=0, help="minutes over which the learning rate falls; 0 = this run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    run = Run(options.out, options.seed)
    train(run, options.minutes, options.total or run.minutes + options.minutes)


if __name__ == "__main__":
    main()
