"""The demo's model and text encoder: training form, cached form, zero-padded form and the host's classes agree."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from demo import data, model, text
from demo.rollout import Cache, Sampler
from tests_support import PACK_ROOT, Host
from tiny import wan_plain

MODELS = PACK_ROOT / "example_workflows" / "models"
DIT = MODELS / "diffusion_models" / "fastar_demo_dit.safetensors"
PARTS = MODELS / "fastar_demo"
PROMPT = "At Oslo, with SAND lined ground and a red disc! far unknownword"


def load(file: Path) -> dict[str, Tensor]:
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def bank() -> data.Bank:
    return data.Bank()


@pytest.fixture(scope="module")
def batch(bank: data.Bank) -> data.Batch:
    return data.draw_batch(bank, data.Recipe(clips=2, blocks=3, fillers=(1,)), 5)


def forced(bank: data.Bank, batch: data.Batch, noisy: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    dit, words = model.init_model(0), text.init_text(len(bank.words), 0)
    shape = (2, len(batch.layout.starts))
    rows = text.encode(words, batch.ids).unflatten(0, shape)
    bias = text.pad_bias(batch.ids).unflatten(0, shape)
    return dit, words, model.teacher_forced(dit, batch.layout, batch.clean, noisy, batch.sigma, rows, bias)


@pytest.mark.cpu
def test_teacher_forcing_equals_the_cached_sampler(bank: data.Bank, batch: data.Batch) -> None:
    noisy = torch.randn(batch.target.shape)
    dit, words, v = forced(bank, batch, noisy)
    sampler, cache = Sampler(dit, words, bank.slate, torch.float32), Cache()
    ids = batch.ids.unflatten(0, (2, -1))
    with torch.no_grad():
        sampler.commit(cache, batch.clean[:, :, :1], 0, sampler.rows(ids[:, 0]))
        for number, start in enumerate(batch.layout.starts):
            span, rows = slice(3 * number, 3 * number + 3), sampler.rows(ids[:, number])
            for row in range(2):
                single = (rows[0], rows[1])
                t = 1000 * float(batch.sigma[row, number])
                got, _ = sampler.call(noisy[:, :, span], t, start, single, cache.visible(start, None, False))
                assert (got[row] - v[row, :, span]).abs().max() < 2e-5
            if number < len(batch.layout.starts) - 1:
                sampler.commit(cache, batch.clean[:, :, 1:][:, :, span], start, rows)


@pytest.mark.cpu
def test_history_pass_equals_one_pass(bank: data.Bank, batch: data.Batch) -> None:
    noisy = torch.randn(batch.target.shape)
    dit, words, v = forced(bank, batch, noisy)
    rows, bias = text.encode(words, batch.ids).unflatten(0, (2, 3)), text.pad_bias(batch.ids).unflatten(0, (2, 3))
    starts = batch.layout.starts
    past = model.history_keys(dit, model.Layout(starts[:2], history=True), batch.clean, rows[:, :2], bias[:, :2])
    last = model.Layout(starts[2:], lead=False)
    got = model.teacher_forced(dit, last, batch.clean[:, :, 7:], noisy[:, :, 6:], batch.sigma[:, 2:], rows[:, 2:], bias[:, 2:], past)
    assert (got - v[:, :, 6:]).abs().max() < 2e-5


@pytest.mark.cpu
def test_pad_bias_equals_512_rows(bank: data.Bank) -> None:
    words, dit = text.init_text(len(bank.words), 0), model.init_model(0)
    ids = text.batch_ids([PROMPT, "at oslo"], bank.words)
    rows, bias = text.encode(words, ids), text.pad_bias(ids)
    full = torch.zeros(2, text.TEXT_LENGTH, rows.shape[-1])
    full[:, : rows.shape[1]] = rows
    q = torch.randn(2, 5, model.HEADS, 128)

    def attend(source: Tensor, mask: Tensor | None) -> Tensor:
        k = wan_plain.embed_text(dit, source).unflatten(-1, (model.HEADS, -1)).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, k, mask)

    assert (attend(rows, bias[:, None, None]) - attend(full, None)).abs().max() < 1e-5
    assert (attend(rows, None) - attend(full, None)).abs().max() > 1e-2


@pytest.mark.cpu
def test_rope_is_relative_and_keeps_inner_products() -> None:
    x, y = torch.randn(2, 1, 6, 2, 128).double()
    here = wan_plain.grid_positions(1, 2, 3)
    there = here + torch.tensor([5000, 0, 0])
    near, far = ((wan_plain.rope_rotate(x, at) * wan_plain.rope_rotate(y, at)).sum(-1) for at in (here, there))
    assert (near - far).abs().max() < 1e-9
    moved = wan_plain.rope_rotate(x, here + torch.tensor([1, 0, 0]))
    assert (moved - wan_plain.rope_rotate(x, here)).abs().max() > 1e-2


@pytest.mark.cpu
def test_files_fit_the_size_limits_and_say_what_they_are() -> None:
    files = [DIT, *PARTS.glob("*.safetensors")]
    assert len(files) == 4
    assert sum(file.stat().st_size for file in files) <= 16e6
    with safe_open(DIT, "pt") as opened:
        meta = opened.metadata()
        assert {opened.get_tensor(name).dtype for name in opened.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert json.loads(meta["config"])["transformer"]["causal_ar"] is True
    assert json.loads(meta["fastar"])["family"] == "demo"


def parts() -> Any:
    return importlib.import_module("fastar_pack.nodes.host.demo_parts")


@pytest.mark.cpu
@torch.inference_mode()
def test_host_loads_the_model_and_gives_the_same_velocity(host: Host) -> None:
    sd = importlib.import_module("comfy.sd")
    inner = sd.load_diffusion_model(str(DIT)).model.diffusion_model.float()
    weights = load(DIT)
    x, t, context = torch.randn(1, 16, 3, 16, 16), torch.full((1, 3), 937.5), torch.randn(1, 512, 4096)
    positions = wan_plain.grid_positions(3, 8, 8)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = wan_plain.rope_rotate(q, positions), wan_plain.rope_rotate(k, positions)
        return wan_plain.dense_attention(layer, q, k, v)

    want = wan_plain.wan_forward(weights, x, t, context, num_heads=model.HEADS, attend=attend)
    got = inner(x, t[:, 0], context)
    assert want.std() > 0.1
    assert (got - want).abs().max() < 5e-5


@pytest.mark.cpu
@torch.inference_mode()
def test_host_text_encoder_equals_the_trained_one(host: Host, bank: data.Bank) -> None:
    file = PARTS / "fastar_demo_text.safetensors"
    clip = parts().load_demo_clip(str(file))
    (conditioning,) = importlib.import_module("nodes").CLIPTextEncode().encode(clip, PROMPT)
    got = conditioning[0][0]
    ids = text.batch_ids([PROMPT], bank.words)
    want = text.encode(load(file), ids)
    count = int((ids != text.PAD).sum())
    assert text.UNKNOWN in ids
    assert got.shape == (1, 512, 4096)
    assert (got[0, :count] - want[0, :count]).abs().max() < 1e-4
    assert got[0, count:].abs().max() == 0
    (longest,) = importlib.import_module("nodes").CLIPTextEncode().encode(clip, "beyond oslo " * 300)
    assert longest[0][0].shape == (1, 512, 4096)


@pytest.mark.cpu
@torch.inference_mode()
def test_host_codec_is_the_trained_one_in_the_host_latent_format(host: Host, bank: data.Bank) -> None:
    formats, nodes = (importlib.import_module(name) for name in ("comfy.latent_formats", "nodes"))
    vae = parts().load_demo_vae(str(PARTS / "fastar_demo_vae.safetensors"))
    latents = torch.randn(2, 16, 5, 4, 6)
    frames = vae.decode(formats.Wan21().process_out(latents.clone()))
    assert frames.shape == (2, 17, 32, 48, 3)
    want = torch.stack([bank.codec.decode(row) for row in latents]).clamp(0, 1)
    assert (frames - want).abs().max() < 1e-4
    pictures = torch.rand(9, 32, 48, 3)
    back = formats.Wan21().process_in(nodes.VAEEncode().encode(vae, pictures)[0]["samples"])
    assert (back[0] - bank.codec.encode(pictures)).abs().max() < 1e-4
    stock = nodes.VAEDecode().decode(vae, {"samples": formats.Wan21().process_out(latents[:1].clone())})[0]
    tiled = nodes.VAEDecodeTiled().decode(vae, {"samples": formats.Wan21().process_out(latents[:1].clone())}, 64, 16, 8, 4)[0]
    assert stock.shape == (17, 32, 48, 3)
    assert (stock - tiled).abs().max() < 1e-4
    assert (vae.latent_channels, vae.temporal_compression_decode(), vae.spacial_compression_decode()) == (16, 4, 8)


@pytest.mark.cpu
def test_demo_loaders_refuse_other_files(host: Host, bank: data.Bank, tmp_path: Path) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"nothing")
    slate = parts().load_demo_slate(str(PARTS / "fastar_demo_slate.safetensors"))
    formats = importlib.import_module("comfy.latent_formats")
    assert (formats.Wan21().process_in(slate)[0, :, 0] - bank.slate).abs().max() < 1e-5
    for loader in (parts().load_demo_vae, parts().load_demo_clip, parts().load_demo_slate):
        with pytest.raises(ValueError, match="fastar_demo_"):
            loader(str(DIT))
        with pytest.raises(ValueError, match="cannot be read"):
            loader(str(broken))
