"""Pictures of the pack: the demo's start pictures, and thumbnails of the workflows. Run from the tests folder:

    python -m workflows.pictures starts
    python -m workflows.pictures sheet VIDEO.mp4 NAME      thumbnail of the workflow NAME from its result
    python -m workflows.pictures readme VIDEO.mp4          the contact sheet that the README shows
    python -m workflows.pictures graph SCREENSHOT.png NAME thumbnail of the workflow NAME from a picture of its graph
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from demo import world
from tests_support import PACK_ROOT

FOLDER = PACK_ROOT / "example_workflows"
STARTS = FOLDER / "models" / "pictures"
README_PICTURE = FOLDER / "contact_sheet.png"
THUMBNAIL = (640, 480)
LOOKS = (("moss", "lined", "red", "ring"), ("sky", "plain", "yellow", "diamond"), ("clay", "checked", "white", "cross"))
GAP, LABEL = 6, 16


def start_pictures() -> dict[str, Image.Image]:
    """File name -> picture of one place of the demo world, as the model saw places in training."""
    pictures = {}
    for ground, texture, colour, shape in LOOKS:
        look = world.Look(
            tuple(world.GROUNDS).index(ground), world.TEXTURES.index(texture),
            tuple(world.COLOURS).index(colour), world.SHAPES.index(shape),
        )  # fmt: skip
        pixels = (world.view(look, look, 8).clamp(0, 1) * 255).round().byte().numpy()
        pictures[f"{ground}_{texture}_{colour}_{shape}.png"] = Image.fromarray(pixels)
    return pictures


def read_frames(video: Path) -> list[Image.Image]:
    """All frames of a video file."""
    import av

    with av.open(str(video)) as file:
        return [frame.to_image() for frame in file.decode(video=0)]


def contact_sheet(frames: list[Image.Image], count: int, columns: int, fps: int = 16) -> Image.Image:
    """`count` frames at equal distances, each with its number and second below."""
    width, height = frames[0].size
    picked = [round(i * (len(frames) - 1) / (count - 1)) for i in range(count)]
    rows = -(-count // columns)
    size = (columns * (width + GAP) + GAP, rows * (height + LABEL + GAP) + GAP)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for place, number in enumerate(picked):
        x = GAP + place % columns * (width + GAP)
        y = GAP + place // columns * (height + LABEL + GAP)
        sheet.paste(frames[number], (x, y))
        draw.text((x, y + height + 2), f"frame {number}, {number / fps:.1f} s", fill="black")
    return sheet


def thumbnail(picture: Image.Image) -> Image.Image:
    """The picture inside THUMBNAIL, with bars in the colour of the canvas of the web interface."""
    scale = min(THUMBNAIL[0] / picture.width, THUMBNAIL[1] / picture.height)
    size = (round(picture.width * scale), round(picture.height * scale))
    small = picture.convert("RGB").resize(size, Image.Resampling.LANCZOS)
    whole = Image.new("RGB", THUMBNAIL, (32, 32, 32))
    whole.paste(small, ((THUMBNAIL[0] - small.width) // 2, (THUMBNAIL[1] - small.height) // 2))
    return whole


def main(arguments: list[str]) -> None:
    """See the top of this file."""
    match arguments:
        case ["starts"]:
            STARTS.mkdir(parents=True, exist_ok=True)
            for name, picture in start_pictures().items():
                picture.save(STARTS / name, optimize=True)
        case ["sheet", video, name]:
            _save_thumbnail(contact_sheet(read_frames(Path(video)), 12, 4), name)
        case ["readme", video]:
            contact_sheet(read_frames(Path(video)), 24, 8).quantize(256).save(README_PICTURE, optimize=True)
        case ["graph", screenshot, name]:
            _save_thumbnail(Image.open(screenshot), name)
        case _:
            sys.exit(__doc__)


def _save_thumbnail(picture: Any, name: str) -> None:
    thumbnail(picture).save(FOLDER / f"{name}.jpg", quality=85, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
