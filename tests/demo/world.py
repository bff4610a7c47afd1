"""The procedural world of the demo models: every pixel follows from the prompts and from what was shown before.

A place has a name; its looks (ground colour, ground texture, one landmark of a shape and a colour) are drawn anew per
clip and named only when it is first shown. The camera stays in a place, cuts to another one ("at <name>") or slides
there by four tokens per latent frame ("to <name>"); other clauses name far places that are never shown. Ground
textures have a period of one token; a weak light fixed to the camera tells left from right and top from bottom.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

SIZE = 128
TOKEN = 16
BLOCK = 3
SLIDE = (4, 8, 8)

NAMES = (
    "arden",
    "birka",
    "corvo",
    "delph",
    "elmet",
    "farne",
    "jarrow",
    "kolar",
    "lund",
    "mira",
    "nara",
    "oslo",
    "petra",
    "quito",
    "visby",
    "zadar",
)
FAR = (
    "galle",
    "hova",
    "istra",
    "ravna",
    "sines",
    "tarfa",
    "ulm",
    "wells",
)
VOCABULARY_NAMES = tuple(sorted((*NAMES, *FAR)))
GROUNDS = {
    "sand": (0.78, 0.68, 0.48),
    "moss": (0.36, 0.52, 0.32),
    "rose": (0.80, 0.56, 0.60),
    "sky": (0.52, 0.68, 0.80),
    "dusk": (0.36, 0.32, 0.52),
    "clay": (0.58, 0.38, 0.30),
    "fog": (0.60, 0.62, 0.64),
    "teal": (0.26, 0.50, 0.52),
}
TEXTURES = ("plain", "lined", "barred", "checked")
COLOURS = {
    "red": (0.82, 0.14, 0.14),
    "yellow": (0.86, 0.80, 0.16),
    "green": (0.14, 0.66, 0.20),
    "blue": (0.16, 0.22, 0.80),
    "white": (0.86, 0.86, 0.86),
    "black": (0.14, 0.14, 0.14),
}
SHAPES = ("disc", "square", "diamond", "triangle", "cross", "ring")
FILLERS = (("beyond",), ("past",), ("not", "near"), ("long", "after"), ("without", "seeing"))
GRAMMAR = ("at", "from", "to", "with", "ground", "and", "a", "the")


class Look(NamedTuple):
    """Indices into GROUNDS, TEXTURES, COLOURS and SHAPES."""

    ground: int
    texture: int
    colour: int
    shape: int

    def words(self) -> str:
        """How a prompt names the look."""
        ground, colour = tuple(GROUNDS)[self.ground], tuple(COLOURS)[self.colour]
        return f"with {ground} {TEXTURES[self.texture]} ground and a {colour} {SHAPES[self.shape]}"

    def index(self) -> int:
        """Number of the look in the order of `all_looks`."""
        return ((self.ground * len(TEXTURES) + self.texture) * len(COLOURS) + self.colour) * len(SHAPES) + self.shape


def all_looks() -> list[Look]:
    """Every look, in the order of Look.index."""
    return [
        Look(g, t, c, s) for g in range(len(GROUNDS)) for t in range(len(TEXTURES)) for c in range(len(COLOURS)) for s in range(len(SHAPES))
    ]


def _distance(shape: str) -> Tensor:
    """Signed distance in pixels (negative inside) [SIZE, SIZE] of a landmark standing in the middle."""
    axis = torch.arange(SIZE, dtype=torch.float32) - (SIZE - 1) / 2
    y, x = axis[:, None].expand(SIZE, SIZE), axis[None, :].expand(SIZE, SIZE)
    radius = torch.sqrt(x * x + y * y)
    if shape == "disc":
        return radius - 40
    if shape == "ring":
        return (radius - 33).abs() - 10
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - 36
    if shape == "diamond":
        return (x.abs() + y.abs() - 50) / 2**0.5
    if shape == "cross":
        thick, long = 12, 44
        arms = [torch.maximum(x.abs() - w, y.abs() - h) for w, h in ((thick, long), (long, thick))]
        return torch.minimum(*arms)
    slope = 0.6
    return torch.maximum(y - 36, (x.abs() - (y + 44) * slope) / (1 + slope**2) ** 0.5)


def _texture(name: str) -> Tensor:
    """Brightness change [SIZE, SIZE] with a period of one token (16 pixels)."""
    wave = torch.sin(2 * torch.pi * (torch.arange(SIZE, dtype=torch.float32) + 0.5) / TOKEN) * 0.06
    rows, columns = wave[:, None].expand(SIZE, SIZE), wave[None, :].expand(SIZE, SIZE)
    return {"plain": torch.zeros(SIZE, SIZE), "lined": rows, "barred": columns, "checked": rows * columns / 0.06}[name]


def light() -> Tensor:
    """The camera's light [SIZE, SIZE, 3], added to every picture: redder to the right, bluer to the bottom."""
    axis = (torch.arange(SIZE, dtype=torch.float32) + 0.5) / SIZE - 0.5
    y, x = axis[:, None].expand(SIZE, SIZE), axis[None, :].expand(SIZE, SIZE)
    return 0.14 * torch.stack((x, -(x + y) / 2, y), dim=-1)


def render(look: Look) -> Tensor:
    """One place as the camera sees it, without the light: [SIZE, SIZE, 3] in 0..1."""
    ground = torch.tensor(tuple(GROUNDS.values())[look.ground]) + _texture(TEXTURES[look.texture])[..., None]
    colour = torch.tensor(tuple(COLOURS.values())[look.colour])
    cover = torch.sigmoid(-_distance(SHAPES[look.shape]) / 1.2)[..., None]
    return ground * (1 - cover) + colour * cover


def view(left: Look, right: Look, shift: int) -> Tensor:
    """The camera `shift` tokens (0..8) on its way from `left` to `right`, with light: [SIZE, SIZE, 3]."""
    wide = torch.cat((render(left), render(right)), dim=1)
    return wide[:, shift * TOKEN : shift * TOKEN + SIZE] + light()


@dataclass
class Block:
    """Three latent frames: their prompt, what they show, and how the block is determined."""

    prompt: str
    kind: str  # new, stay, back, slide_new, slide_back
    left: Look
    right: Look
    name: str

    def shifts(self) -> tuple[int, ...]:
        """Camera shift in tokens per latent frame."""
        return SLIDE if self.kind.startswith("slide") else (8,) * BLOCK


@dataclass
class Journey:
    """A clip being drawn: which places were shown with which looks, and where the camera is."""

    rng: random.Random
    fillers: int = 0
    shown: dict[str, Look] = field(default_factory=dict)
    here: str = ""

    def draw_look(self) -> Look:
        """A look whose landmark differs from every landmark shown so far."""
        taken = {(look.colour, look.shape) for look in self.shown.values()}
        while True:
            look = Look(*(self.rng.randrange(len(v)) for v in (GROUNDS, TEXTURES, COLOURS, SHAPES)))
            if (look.colour, look.shape) not in taken:
                return look

    def new_name(self) -> str:
        """A place not shown in this clip."""
        return self.rng.choice([name for name in NAMES if name not in self.shown])

    def _sentence(self, core: str) -> str:
        clauses = [" ".join((*self.rng.choice(FILLERS), self.rng.choice(FAR))) for _ in range(self.fillers)]
        cut = self.rng.randint(0, len(clauses))
        return " ".join((*clauses[:cut], core, *clauses[cut:]))

    def arrive(self, name: str) -> Block:
        """A cut: the camera is at `name` at once; looks are named when the place is new."""
        return self._block(name, f"at {name}", "back" if name in self.shown else "new")

    def slide(self, name: str) -> Block:
        """The camera slides from here to `name`; looks are named when the place is new."""
        kind = "slide_back" if name in self.shown else "slide_new"
        return self._block(name, f"to {name}", kind)

    def stay(self) -> Block:
        """Three more latent frames of the place where the camera is."""
        return self._block(self.here, f"at {self.here}", "stay")

    def _block(self, name: str, core: str, kind: str) -> Block:
        left_name = self.here or name
        if name not in self.shown:
            self.shown[name] = self.draw_look()
            core = f"{core} {self.shown[name].words()}"
        left = self.shown.get(left_name, self.shown[name])
        prompt = self._sentence(core)
        self.here = name
        return Block(prompt, kind, left, self.shown[name], name)

    def start_image(self) -> Look:
        """Begin with a picture of a place: its look is shown, never named."""
        self.here = self.new_name()
        self.shown[self.here] = self.draw_look()
        return self.shown[self.here]


def draw_clip(
    rng: random.Random,
    blocks: int,
    *,
    gaps: tuple[int, ...] = (),
    image: bool = False,
    fillers: int = 0,
    fresh: int = 1,
    new: float = 0.3,
    slide: float = 0.6,
) -> tuple[Look | None, list[Block]]:
    """One training clip: (look of the start image or None, blocks).

    gaps: block numbers before which time passes; such a block is always a cut. fresh: so many blocks at the start show
    new places; later ones do so with chance `new`, else three in five return to a place and two in five stay.
    slide: chance of a slide instead of a cut.
    """
    journey = Journey(rng, fillers)
    start = journey.start_image() if image else None
    out: list[Block] = []
    for number in range(blocks):
        is_new = number < fresh or rng.random() < new
        others = [name for name in journey.shown if name != journey.here]
        target = journey.new_name() if is_new else journey.here
        if not is_new and others and (number in gaps or rng.random() < 0.6):
            target = rng.choice(others)
        if number == 0 and image:
            out.append(journey.stay())
        elif number == 0 or number in gaps:
            out.append(journey.arrive(target))
        elif target == journey.here:
            out.append(journey.stay())
        else:
            out.append(journey.slide(target) if rng.random() < slide else journey.arrive(target))
    return start, out


def vocabulary() -> tuple[str, ...]:
    """All words a prompt can hold, in a fixed order."""
    fillers = {word: None for clause in FILLERS for word in clause}
    return (*GRAMMAR, *VOCABULARY_NAMES, *GROUNDS, *TEXTURES, *COLOURS, *SHAPES, *fillers)
