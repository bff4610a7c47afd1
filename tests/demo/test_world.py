"""The demo world and its codec: everything shown follows from the prompts and from what was shown before."""

from __future__ import annotations

import random
import re

import pytest
import torch

from demo import codec, data, world

GRAMMAR = re.compile(
    r"(?:at (?P<at>\w+)|to (?P<to>\w+))"
    r"(?: with (?P<ground>\w+) (?P<texture>\w+) ground and a (?P<colour>\w+) (?P<shape>\w+))?"
)


@pytest.fixture(scope="module")
def bank() -> data.Bank:
    return data.Bank()


def read(prompts: list[str], start: tuple[str, world.Look] | None) -> list[torch.Tensor]:
    """Pictures of all latent frames as a reader of the prompts alone would draw them."""
    known = dict([start]) if start else {}
    pictures, here = [], start[0] if start else ""
    for prompt in prompts:
        found = GRAMMAR.search(prompt)
        assert found, prompt
        name = found["at"] or found["to"]
        if found["ground"]:
            assert name not in known, f"{prompt!r} names looks that were shown before"
            known[name] = world.Look(
                list(world.GROUNDS).index(found["ground"]),
                world.TEXTURES.index(found["texture"]),
                list(world.COLOURS).index(found["colour"]),
                world.SHAPES.index(found["shape"]),
            )
        left = known[here if found["to"] else name]
        shifts = world.SLIDE if found["to"] else (8, 8, 8)
        pictures += [world.view(left, known[name], shift) for shift in shifts]
        here = name
    return pictures


@pytest.mark.cpu
@pytest.mark.parametrize("seed", range(6))
def test_pictures_follow_from_prompts_and_history(bank: data.Bank, seed: int) -> None:
    image = seed % 3 == 0
    start, blocks = world.draw_clip(random.Random(seed), 9, gaps=(5,), image=image, fillers=seed % 4)
    drawn = read([block.prompt for block in blocks], (blocks[0].name, start) if start else None)
    latents = torch.cat([bank.frames(block) for block in blocks], 1)
    wanted = torch.stack([bank.codec.still(picture) for picture in drawn], 1)
    assert (latents - wanted).abs().max() < 1e-4
    other = torch.stack([bank.codec.still(picture) for picture in drawn[1:] + drawn[:1]], 1)
    assert (latents - other).abs().max() > 0.1


@pytest.mark.cpu
def test_clips_depend_on_the_seed_alone() -> None:
    first, again, other = (world.draw_clip(random.Random(seed), 6, fillers=2) for seed in (3, 3, 4))
    assert first == again
    assert first != other


@pytest.mark.cpu
def test_landmarks_of_a_clip_differ() -> None:
    for seed in range(20):
        journey = world.Journey(random.Random(seed))
        looks = [journey.arrive(journey.new_name()).right for _ in range(12)]
        assert len({(look.colour, look.shape) for look in looks}) == len(looks)


@pytest.mark.cpu
def test_every_prompt_word_is_in_the_vocabulary() -> None:
    words = set(world.vocabulary())
    for seed in range(20):
        for block in world.draw_clip(random.Random(seed), 8, fillers=5)[1]:
            assert set(block.prompt.split()) <= words


@pytest.mark.cpu
def test_codec_round_trip_keeps_26_dB(bank: data.Bank) -> None:
    fresh = data.fit_codec(torch.stack([world.render(look) for look in world.all_looks()]))
    for look in random.Random(0).sample(world.all_looks(), 40):
        picture = world.render(look) + world.light()
        for coder in (bank.codec, fresh):
            error = (coder.decode(coder.still(picture)[:, None])[0] - picture).square().mean()
            assert -10 * torch.log10(error) >= 26
    poor = codec.Codec(bank.codec.mean, bank.codec.basis[:2], bank.codec.scale)
    flat = poor.encode(picture[None])[:, 0]
    error = (
        (flat[:, None].permute(1, 2, 3, 0) * poor.scale @ poor.basis + poor.mean - codec._patches(picture[None].expand(4, -1, -1, -1)))
        .square()
        .mean()
    )
    assert -10 * torch.log10(error) < 26


@pytest.mark.cpu
def test_latent_frames_are_independent_and_the_first_is_one_picture(bank: data.Bank) -> None:
    latents = torch.randn(16, 4, 16, 16)
    whole = bank.codec.decode(latents)
    assert whole.shape == (13, 128, 128, 3)
    assert torch.equal(whole[0], bank.codec.decode(latents[:, :1])[0])
    tail = bank.codec.decode(latents[:, 2:])
    assert torch.allclose(whole[9:], tail[1:], atol=1e-6)
    assert torch.allclose(bank.codec.encode(whole)[:, 1:], latents[:, 1:], atol=1e-4)


@pytest.mark.cpu
def test_latents_have_unit_scale(bank: data.Bank) -> None:
    latents = torch.stack([bank.scene(look) for look in random.Random(1).sample(world.all_looks(), 60)])
    assert 0.85 < latents.std() < 1.15
    assert 0.9 < bank.slate.std() < 1.1
