"""The four gates of the demo models over held-out seeds, with 95 % intervals. Run from the tests folder:

    python -m demo.gates [--weights FILE] [--seeds 64] [--json FILE] [--sheet FILE]

(a) codec PSNR; (b) PSNR of the next block when everything before it is true; (c) named landmarks recognised in
rollouts of 60 latent frames; (d) landmark right on the return to a place after >= 27 latent frames away, its looks
not named again: with everything kept, with a window of 9 latent frames, and with the history removed.
A landmark counts as recognised when the nearest of all 1152 scenes has its colour and its shape.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from demo import text, world
from demo.data import SHIPPED, Bank
from demo.rollout import Sampler
from demo.world import BLOCK, Block, Look

HELD_OUT = 5_000_000
BACK = 12
BLOCKS = 20
BATCH = 16


def itinerary(seed: int) -> list[Block]:
    """20 blocks: a place, two or three others for 10 blocks, back at block 12, then old and new places."""
    rng = random.Random(HELD_OUT + seed)
    journey = world.Journey(rng, fillers=(0, 0, 1, 3)[seed % 4])
    blocks = [journey.arrive(journey.new_name()), journey.stay()]
    home = journey.here
    for length in rng.choice(((5, 5), (3, 4, 3), (4, 3, 3), (3, 3, 4))):
        blocks.append(journey.slide(journey.new_name()))
        blocks += [journey.stay() for _ in range(length - 1)]
    blocks += [journey.slide(home), journey.stay()]
    while len(blocks) < BLOCKS:
        old = [name for name in journey.shown if name not in (journey.here, home)]
        target = rng.choice(old) if rng.random() < 0.4 else journey.new_name()
        blocks += [journey.slide(target) if rng.random() < 0.5 else journey.arrive(target), journey.stay()]
    return blocks[:BLOCKS]


class Judge:
    """Names the scene nearest to a picture."""

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        self.looks = world.all_looks()
        pictures = torch.stack([world.render(look) for look in self.looks]) + world.light()
        self.small = self._shrink(pictures)

    @staticmethod
    def _shrink(pictures: Tensor) -> Tensor:
        return F.avg_pool2d(pictures.permute(0, 3, 1, 2), 4).flatten(1)

    def pixels(self, latents: Tensor) -> Tensor:
        """Latents [C, T, h, w] -> [4*T, H, W, 3], every latent frame as four pixel frames, clamped."""
        lead = torch.cat((latents[:, :1], latents), 1)
        return self.bank.codec.decode(lead)[1:].clamp(0, 1)

    def look(self, latent: Tensor) -> Look:
        """The nearest look of one latent frame [C, h, w]."""
        picture = self._shrink(self.pixels(latent[:, None])[-1:])
        return self.looks[int(torch.cdist(picture, self.small).argmin())]

    def landmark(self, latent: Tensor, look: Look) -> bool:
        """Whether colour and shape of the landmark are those of `look`."""
        seen = self.look(latent)
        return (seen.colour, seen.shape) == (look.colour, look.shape)


def wilson(hits: int, total: int) -> tuple[float, float, float]:
    """Rate with its 95 % interval."""
    z, p = 1.96, hits / total
    middle, width = p + z * z / (2 * total), z * (p * (1 - p) / total + z * z / (4 * total**2)) ** 0.5
    return p, (middle - width) / (1 + z * z / total), (middle + width) / (1 + z * z / total)


def mean(values: list[float]) -> tuple[float, float, float]:
    """Mean with its 95 % interval."""
    t = torch.tensor(values)
    half = 1.96 * float(t.std()) / len(values) ** 0.5 if len(values) > 1 else float("nan")
    return float(t.mean()), float(t.mean()) - half, float(t.mean()) + half


def decibel(a: Tensor, b: Tensor) -> float:
    """PSNR of pixels in 0..1."""
    return float(-10 * torch.log10((a - b).square().mean()))


class Gates:
    """Collects what the four gates need, batch of seeds by batch of seeds."""

    def __init__(self, bank: Bank, sampler: Sampler) -> None:
        self.bank, self.sampler, self.judge = bank, sampler, Judge(bank)
        self.codec: list[float] = []
        self.forced: dict[str, list[float]] = defaultdict(list)
        self.per_seed: list[float] = []
        self.named: list[bool] = []
        self.back: dict[str, list[bool]] = {"full": [], "window 9": [], "history removed": []}
        self.last: Tensor | None = None

    def add(self, seeds: list[int]) -> None:
        """Run one batch."""
        tours = [itinerary(seed) for seed in seeds]
        ids = [text.batch_ids([tour[n].prompt for tour in tours], self.bank.words) for n in range(BLOCKS)]
        truth = torch.stack([torch.cat([self.bank.slate[:, None], *map(self.bank.frames, tour)], 1) for tour in tours])
        self._codec(tours)
        self._forced(tours, self.sampler.run(ids, seeds[0], truth=truth), truth)
        bare = {BACK: truth}
        full = self.sampler.run(ids, seeds[0], bare=bare)
        short = self.sampler.run(ids[: BACK + 1], seeds[0], window=9)
        self.last = full
        at = BLOCK * (BACK + 1)
        for row, tour in enumerate(tours):
            self._named(tour, full[row])
            for name, latent in (
                ("full", full[row][:, at]),
                ("window 9", short[row][:, at]),
                ("history removed", bare[BACK][row][:, -1]),
            ):
                self.back[name].append(self.judge.landmark(latent, tour[BACK].right))

    def _codec(self, tours: list[list[Block]]) -> None:
        for tour in tours:
            looks = [block.right for block in tour if block.kind in ("new", "slide_new")]
            pictures = torch.stack([world.render(look) for look in looks]) + world.light()
            again = torch.stack([self.bank.codec.decode(self.bank.codec.still(p)[:, None])[0] for p in pictures])
            self.codec.append(decibel(again.clamp(0, 1), pictures))

    def _forced(self, tours: list[list[Block]], got: Tensor, truth: Tensor) -> None:
        for row, tour in enumerate(tours):
            values = []
            for number, block in enumerate(tour):
                span = slice(1 + BLOCK * number, 1 + BLOCK * (number + 1))
                values.append(decibel(self.judge.pixels(got[row][:, span]), self.judge.pixels(truth[row][:, span])))
                self.forced[block.kind].append(values[-1])
            self.per_seed.append(sum(values) / len(values))

    def _named(self, tour: list[Block], latents: Tensor) -> None:
        for number, block in enumerate(tour):
            if block.kind in ("new", "slide_new"):
                self.named.append(self.judge.landmark(latents[:, BLOCK * (number + 1)], block.right))

    def report(self) -> list[dict[str, object]]:
        """Rows {gate, value, low, high, target, holds}."""
        rows: list[tuple[str, tuple[float, float, float], float, int]] = [
            ("a codec dB", mean(self.codec), 26, 1),
            ("b next block, true history, dB", mean(self.per_seed), 20, 1),
        ]
        rows += [(f"b only {kind}, dB", mean(values), 20, 1) for kind, values in sorted(self.forced.items())]
        rows.append(("c named landmarks in 60-frame rollouts", wilson(sum(self.named), len(self.named)), 0.8, 1))
        for (name, hits), (target, sign) in zip(self.back.items(), ((0.8, 1), (0.5, -1), (0.15, -1)), strict=True):
            rows.append((f"d return, {name}", wilson(sum(hits), len(hits)), target, sign))
        return [
            {
                "gate": name,
                "value": round(v[0], 3),
                "low": round(v[1], 3),
                "high": round(v[2], 3),
                "target": ("<= " if sign < 0 else ">= ") + str(target),
                "holds": sign * v[0] >= sign * target,
            }
            for name, v, target, sign in rows
        ]


def sheet(judge: Judge, latents: Tensor, file: Path, rows: int = 8) -> None:
    """Contact sheet: one row per seed, one picture per latent frame (every second one)."""
    from PIL import Image

    strips = []
    for latent in latents[:rows]:
        pictures = judge.pixels(latent)[3::8, ::2, ::2]
        strips.append(torch.cat(list(pictures), 1))
    Image.fromarray((torch.cat(strips, 0) * 255).round().byte().numpy()).save(file)


def shipped_sampler(bank: Bank) -> Sampler:
    """The weight files that come with the pack, computed in fp32."""
    dit = SHIPPED.parents[1] / "diffusion_models" / "fastar_demo_dit.safetensors"
    files = (dit, SHIPPED.with_name("fastar_demo_text.safetensors"))
    parts = [{name: value.float() for name, value in load_file(file).items()} for file in files]
    return Sampler(parts[0], parts[1], bank.slate, torch.float32)


def load_sampler(file: Path, bank: Bank, low: bool) -> Sampler:
    """Averaged training weights, rounded to bf16 as they are shipped; low: also compute in bf16."""
    weights = torch.load(file, weights_only=True)["weights"]
    parts = [{name[len(p) :]: value.bfloat16().float() for name, value in weights.items() if name.startswith(p)} for p in ("dit.", "text.")]
    return Sampler(parts[0], parts[1], bank.slate, torch.bfloat16 if low else torch.float32)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, help="average.pt of a training run; default: the shipped files")
    parser.add_argument("--seeds", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--low", action="store_true", help="compute in bf16: quick, not the gate")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sheet", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bank = Bank()
    sampler = load_sampler(options.weights, bank, options.low) if options.weights else shipped_sampler(bank)
    gates = Gates(bank, sampler)
    for first in range(0, options.seeds, BATCH):
        gates.add(list(range(first, min(first + BATCH, options.seeds))))
        rows = gates.report()
        if options.json:
            done = {"seeds": min(first + BATCH, options.seeds), "rows": rows}
            options.json.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(f"{row['gate']:42} {row['value']:8} [{row['low']}, {row['high']}] {row['target']:8} {row['holds']}")
    if options.sheet and gates.last is not None:
        sheet(gates.judge, gates.last, options.sheet)


if __name__ == "__main__":
    main()
