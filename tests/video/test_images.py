"""Start images: fitted as the stock node fits them, encoded to the right number of latents, refused in words."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from fastar_pack.fastar_core.errors import GeometryError, UnsupportedError
from host.stream_parts import tiny_wan_vae
from tests_support import Host

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def images(host: Host) -> ModuleType:
    return importlib.import_module("fastar_pack.nodes.host.images")


@pytest.fixture(scope="module")
def vae(host: Host) -> Any:
    return tiny_wan_vae()


def pictures(count: int, height: int = 32, width: int = 48, channels: int = 3) -> torch.Tensor:
    return torch.rand(count, height, width, channels, generator=torch.Generator().manual_seed(3))


class RecordingVae:
    """Stands in for the VAE of the stock node."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        self.seen.append(frames)
        return torch.zeros(1, 16, 1, 4, 6)


class RecordingModel:
    def __init__(self) -> None:
        self.model_options: dict[str, Any] = {}

    def clone(self) -> RecordingModel:
        return self


@pytest.mark.parametrize("size", [(100, 50), (50, 100), (48, 32), (31, 77), (8, 8)])
@pytest.mark.parametrize("channels", [3, 4])
def test_fitted_as_the_stock_node_does(host: Host, images: ModuleType, size: tuple[int, int], channels: int) -> None:
    picture = pictures(1, *size, channels)
    fitted = images.fit_start_image(picture, 48, 32)
    assert fitted.shape == (1, 32, 48, 3)
    stock = pytest.importorskip("comfy_extras.nodes_ar_video", reason="this host has no ARVideoI2V node")
    vae = RecordingVae()
    stock.ARVideoI2V.execute(RecordingModel(), vae, picture, 48, 32, 21, 1)
    assert torch.equal(fitted, vae.seen[0])


def test_the_crop_is_centred_and_keeps_the_aspect(images: ModuleType) -> None:
    wide = torch.zeros(1, 32, 96, 3)
    wide[:, :, 24:72] = 1  # the middle half
    assert (images.fit_start_image(wide, 48, 32) == 1).all()
    tall = torch.zeros(1, 64, 48, 3)
    tall[:, 16:48] = 1
    assert (images.fit_start_image(tall, 48, 32) == 1).all()


@pytest.mark.parametrize(("count", "latents"), [(1, 1), (5, 2), (9, 3)])
def test_images_become_the_latents_that_the_stock_encode_gives(
    images: ModuleType, vae: Any, count: int, latents: int
) -> None:
    given = pictures(count)
    coded = images.encode_prefix(vae, given, 3)
    assert coded.shape == (3, 16, latents, 4, 6)
    assert torch.equal(coded[:1], vae.encode(given).float())
    assert torch.equal(coded[0], coded[2])


def test_one_image_per_row(images: ModuleType, vae: Any) -> None:
    given = pictures(3)
    coded = images.encode_prefix(vae, given, 3)
    assert coded.shape == (3, 16, 1, 4, 6)
    for row in range(3):
        assert torch.equal(coded[row:row + 1], vae.encode(given[row:row + 1]).float())
    assert not torch.equal(coded[0], coded[1])


@pytest.mark.parametrize(
    ("count", "batch", "result"),
    [(1, 1, (False, 1)), (1, 4, (False, 1)), (5, 1, (False, 2)), (5, 5, (True, 1)), (5, 2, (False, 2)), (13, 3, (False, 4))],
)
def test_what_the_number_of_images_means(images: ModuleType, count: int, batch: int, result: tuple[bool, int]) -> None:
    assert images.start_frames(count, batch) == result


@pytest.mark.parametrize(("count", "batch", "words"), [
    (2, 1, "2 images.*1 or 5"), (4, 1, "1 or 5"), (6, 1, "5 or 9"), (3, 2, r"1 or 5.*2 \(one per row"), (8, 1, "5 or 9"),
])
def test_other_counts_are_refused_with_the_next_that_fit(images: ModuleType, count: int, batch: int, words: str) -> None:
    with pytest.raises(GeometryError, match=words):
        images.start_frames(count, batch)


def test_what_is_no_image_or_no_video_vae(images: ModuleType) -> None:
    for shape in ((32, 48, 3), (0, 32, 48, 3), (1, 32, 48, 1)):
        with pytest.raises(GeometryError, match="connect an IMAGE"):
            images.fit_start_image(torch.zeros(shape), 48, 32)

    class ImageVae:
        def encode(self, frames: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(frames), 4, 4, 6)

    with pytest.raises(UnsupportedError, match="Wan 2.1 VAE"):
        images.encode_prefix(ImageVae(), pictures(1), 1)
