"""The demo loaders inside a host: their first choice is the right file of the pack, and a wrong one is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastar_pack.fastar_core.errors import CheckpointError
from tests_support import Host

pytestmark = pytest.mark.cpu

PARTS = {"FastARDemoVAE": "vae", "FastARDemoText": "text", "FastARDemoSlate": "slate"}


def load(host: Host, node_id: str, file: str) -> Any:
    (result,) = host.nodes[node_id]().load(file)
    return result


def choices(host: Host, node_id: str) -> list[str]:
    return host.nodes[node_id].INPUT_TYPES()["required"]["file"][0]


@pytest.mark.parametrize("node_id", PARTS)
def test_the_packs_own_file_stands_first(host: Host, node_id: str) -> None:
    listed = choices(host, node_id)
    assert PARTS[node_id] in listed[0]
    assert set(listed) == set(choices(host, "FastARDemoVAE"))


def test_the_defaults_load_and_fit_each_other(host: Host) -> None:
    vae = load(host, "FastARDemoVAE", choices(host, "FastARDemoVAE")[0])
    slate = load(host, "FastARDemoSlate", choices(host, "FastARDemoSlate")[0])["samples"]
    clip = load(host, "FastARDemoText", choices(host, "FastARDemoText")[0])
    assert slate.shape[:3] == (1, 16, 1)
    pixels = vae.decode(slate)
    assert pixels.shape[-3:] == (slate.shape[3] * 8, slate.shape[4] * 8, 3)
    assert pixels.std() > 0.1
    assert (vae.encode(pixels[0]) - slate).std() < 0.2 * slate.std()  # the clamp to 0..1 costs a little
    prompts, _, _ = host.nodes["FastARPrompts"]().encode(clip, "at oslo\n48: at mira", 16.0)
    assert [frame for frame, _ in prompts] == [0, 12]
    first, second = (conditioning[0][0] for _, conditioning in prompts)
    assert first.shape == second.shape == (1, 512, 4096)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("node_id", PARTS)
def test_a_file_of_another_part_is_refused_by_name(host: Host, node_id: str) -> None:
    wrong = choices(host, node_id)[-1]
    with pytest.raises(CheckpointError, match="demo model"):
        load(host, node_id, wrong)


def test_the_pictures_are_scenes_of_the_demo_size(host: Host) -> None:
    node = host.nodes["FastARDemoPicture"]
    listed = node.INPUT_TYPES()["required"]["picture"][0]
    assert listed
    for name in listed:
        (image,) = node().load(name)
        assert image.shape == (1, 128, 128, 3)
        assert image.dtype == torch.float32
        assert 0 <= image.min() < 0.5 < image.max() <= 1
    with pytest.raises(FileNotFoundError, match="nowhere.png"):
        node().load("../nowhere.png")


def test_previews_have_the_colours_of_the_pictures(host: Host) -> None:
    import latent_preview

    vae = load(host, "FastARDemoVAE", choices(host, "FastARDemoVAE")[0])
    names = host.nodes["FastARDemoPicture"].INPUT_TYPES()["required"]["picture"][0]
    (picture,) = host.nodes["FastARDemoPicture"]().load(names[0])
    shown = vae.first_stage_model.preview_format
    previewer = latent_preview.Latent2RGBPreviewer(shown.latent_rgb_factors, shown.latent_rgb_factors_bias)
    small = previewer.decode_latent_to_preview(shown.process_in(vae.encode(picture).cpu()))
    wanted = torch.nn.functional.avg_pool2d(picture.permute(0, 3, 1, 2), 8)[0].permute(1, 2, 0)
    seen = torch.from_numpy(np.array(small, dtype=np.float32)) / 255
    assert (seen - wanted).abs().mean() < 0.02
