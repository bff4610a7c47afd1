"""Every family on a real host: published file -> loader node -> sampler node, equal to the plain engine and on both hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from fastar_pack.fastar_core.context import FwdCtx
from fastar_pack.fastar_core.drivers import BlockwisePlan, run_plan
from fastar_pack.fastar_core.errors import ConfigError
from fastar_pack.fastar_core.noise import SeededRenoise
from fastar_pack.fastar_core.presets import get_preset, schedule
from fastar_pack.fastar_core.run_choice import choose_policy, choose_run
from fastar_pack.fastar_core.stream_choice import draw_noise
from host.family_runs import FAMILIES, SEED, WEIGHTS, Family, all_runs, load, merged, run, text
from host.stream_parts import tiny_wan_vae
from tests_support import Host
from tiny.golden import RUN_TOLERANCE
from tiny.plain_engine import PlainEngine
from tiny.wan_plain import wan_forward

pytestmark = pytest.mark.cpu
OTHER_HOST = "FASTAR_TEST_HOST_27"


@pytest.fixture(scope="module")
def vae(host: Host) -> Any:
    return tiny_wan_vae()


# -- from a published file to a video ---------------------------------------------------------------------------------------


class Guided(PlainEngine):
    """The plain engine with cfg over two prompts, each with a cache of its own."""

    cfg = 3.0

    def velocity(self, x: Tensor, ctx: FwdCtx) -> Tensor:
        branches = {}
        for branch, rows in zip(("positive", "negative"), self.prompts):
            policy = self.run.policy(branch)
            t = torch.tensor(ctx.timesteps)[None]
            branches[branch] = wan_forward(self.weights, x, t, rows, num_heads=1,
                                           attend=lambda layer, *qkv, policy=policy: policy.attend(layer, *qkv, ctx))
        return branches["negative"] + self.cfg * (branches["positive"] - branches["negative"])


def plain_run(family: Family, vae: Any, latent_format: Any) -> Tensor:
    """The same video without host, loader or nodes; only the VAE (and the scale of its space) is the host's."""
    preset = get_preset(family.key)
    policy = choose_policy(family.options.get("cache", "preset"), 9, 3, preset, None)
    switch = family.options.get("prompt_switch", "preset")
    one = choose_run(preset, policy, len(schedule(preset).sigmas), switch, family.switch is not None)
    noise = draw_noise(SEED, (1, 16, family.latents, 4, 6), 0, preset)
    made: list[Tensor] = []

    def anchor(pixel_from_end: int) -> Tensor:
        pictures = vae.decode(latent_format.process_out(torch.cat(made, 2)))
        return latent_format.process_in(vae.encode(pictures[0, -pixel_from_end][None]))

    prompts = [text(1)[0][0], text(3 if family.switch else 2)[0][0]]
    kind = Guided if family.cfg != 1 else PlainEngine
    engine = kind(merged() if family.lora else WEIGHTS, prompts, 1, tuple(noise.shape), one.block, one.policy)
    plan = BlockwisePlan(noise, schedule(preset), one.block, SeededRenoise(SEED), recache_frames=one.recache_frames,
                         rebuild=one.rebuild, restart=None if one.restart is None else replace(one.restart, anchor=anchor),
                         solver=one.solver, prompt_at=lambda frame: int(family.switch is not None and frame >= family.switch))
    for done in run_plan(one.loop, engine, plan):
        made.append(done.latent)
    return latent_format.process_out(torch.cat(made, 2))


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_published_file_becomes_a_video(name: str, host: Host, vae: Any) -> None:
    import comfy.latent_formats

    family = FAMILIES[name]
    latent, images, told, loaded = run(host, family, vae)
    report = json.loads(told)
    assert latent.shape == (1, 16, family.latents, 4, 6)
    assert images.shape == (family.length, 32, 48, 3)
    assert torch.isfinite(latent).all()
    assert torch.isfinite(images).all()
    assert latent.std() > 0.1
    assert report["settings"]["preset"] == family.key
    assert f"preset: {family.key}" in loaded
    assert report["counts"]["model_calls"] == family.calls
    assert report["counts"]["branches"] == (2 if family.cfg != 1 else 1)
    want = plain_run(family, vae, comfy.latent_formats.Wan21())
    assert (latent - want).abs().max() < 20 * RUN_TOLERANCE, "the published layout, through loader and nodes"
    assert (latent[:, :, :3] - want.roll(3, 2)[:, :, :3]).abs().max() > 0.1


def test_files_say_what_was_ignored_and_refuse_what_is_missing(host: Host) -> None:
    from fastar_pack.fastar_core.errors import CheckpointError

    _, report = load(host, FAMILIES["causvid"])
    assert "ignored" in report
    assert "discriminator" in report or "_cls_pred_branch" in report
    for name in ("krea", "rolling_forcing", "longlive1"):
        family = FAMILIES[name]

        def broken(family: Family = family) -> Any:
            content = dict(family.content())
            entry = next((key for key in content if isinstance(content[key], dict)), None)
            inner = dict(content[entry]) if entry else content
            inner.pop(next(key for key in inner if key.endswith("ffn.0.weight")))
            return {**content, entry: inner} if entry else inner

        with pytest.raises(CheckpointError, match="missing"):
            load(host, replace(family, content=broken))


@pytest.mark.parametrize(("name", "other"), [("longlive1", "longlive1_infinity"), ("rolling_forcing", "rolling_forcing extended")])
def test_rules_differ_once_frames_leave(name: str, other: str, host: Host, vae: Any) -> None:
    first, second = (run(host, replace(FAMILIES[key], switch=None), vae)[0] for key in (name, other))
    same = 12 if "longlive" in name else 9
    assert (first[:, :, :same] - second[:, :, :same]).abs().max() < 1e-3
    assert (first[:, :, same:] - second[:, :, same:]).abs().max() > 1e-2


def test_frames_before_a_switch_are_those_without_it(host: Host, vae: Any) -> None:
    for name in ("longlive1", "longlive1 rebuilt"):
        family = FAMILIES[name]
        switch, plain = run(host, family, vae)[0], run(host, replace(family, switch=None), vae)[0]
        assert torch.equal(switch[:, :, :15], plain[:, :, :15])
        assert (switch[:, :, 15:18] - plain[:, :, 15:18]).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["krea", "causvid"])
def test_an_anchor_is_the_decoded_frame_encoded_again(name: str, host: Host, vae: Any) -> None:
    """Batch of two, decode asked for at the end: it happens between the blocks all the same, and says why."""
    family = FAMILIES[name]
    latent, _, told, _ = run(host, family, vae, batch_size=2, decode="at the end")
    report = json.loads(told)
    assert report["decode"]["mode"] == "between blocks"
    assert "encodes a decoded frame again" in report["decode"]["reason"]
    assert latent.shape[0] == 2
    assert (latent[0] - latent[1]).abs().max() > 0.1
    short = replace(family, latents=6)
    assert json.loads(run(host, short, vae, decode="at the end")[2])["decode"]["mode"] == "at the end"


def test_a_vae_that_cannot_stream_is_refused_where_frames_are_encoded_again(host: Host, vae: Any, monkeypatch: Any) -> None:
    from fastar_pack.nodes.host import stream_job

    found = stream_job.probe(vae, 3)
    monkeypatch.setattr(stream_job, "probe", lambda given, block: replace(found, kind="whole", line="this VAE decodes as a whole"))
    with pytest.raises(ConfigError, match="Krea Realtime 14B .* encodes a decoded frame again .*connect the Wan 2.1 VAE"):
        run(host, FAMILIES["krea"], vae)


def test_the_plain_sampler_runs_families_or_says_why_not(host: Host, vae: Any) -> None:
    from comfy_extras import nodes_custom_sampler as custom

    def sampled(name: str, latents: int) -> Tensor:
        family = FAMILIES[name]
        model, _ = load(host, family)
        guider = custom.CFGGuider.execute(model, text(1), text(2), family.cfg)[0]
        sampler = host.nodes["FastARSampler"]().make("auto", family.options.get("cache", "preset"), 9, 3)[0]
        sigmas = torch.tensor([*schedule(get_preset(family.key)).sigmas, 0.0])
        latent = {"samples": torch.zeros(1, 16, latents, 4, 6)}
        with torch.no_grad():
            return custom.SamplerCustomAdvanced.execute(custom.RandomNoise.execute(SEED)[0], guider, sampler, sigmas, latent)[0]["samples"]

    for name in ("rolling_forcing", "rolling_forcing extended", "causal_forcing_longvideo", "self_forcing"):
        family = FAMILIES[name]
        assert torch.equal(sampled(name, family.latents), run(host, family, vae)[0]), name
    teacher = FAMILIES["causal_forcing_teacher"]
    apart = (sampled("causal_forcing_teacher", 6) - run(host, teacher, vae)[0]).abs().max()
    assert 0 < apart < 0.02, "the host scales its noise with the first sigma, 0.9998"
    for name in ("krea", "causvid"):
        with pytest.raises(ConfigError, match="a SAMPLER has no VAE; use the FAST-AR Streaming Sampler"):
            sampled(name, FAMILIES[name].latents)
    assert torch.equal(sampled("krea", 6), run(host, replace(FAMILIES["krea"], latents=6), vae)[0])


def test_both_hosts_give_the_same_latents(host: Host, tmp_path: Path) -> None:
    named = os.environ.get(OTHER_HOST)
    if not named or Path(named).expanduser().resolve() == host.path:
        pytest.skip(f"{OTHER_HOST} names no second ComfyUI checkout")
    target = tmp_path / "other.safetensors"
    script = Path(__file__).with_name("family_runs.py")
    (tmp_path / "there").mkdir()
    command = [sys.executable, str(script), str(Path(named).expanduser().resolve()), str(tmp_path / "there"), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    with torch.no_grad():
        here = all_runs(host)
    with safe_open(str(target), "pt") as file:
        assert file.metadata()["version"] != host.version
        there = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    assert there.keys() == here.keys()
    anchored = {"krea": 6, "causvid": 21}  # from these frames on the hosts' own VAEs, which differ in the last bit, have a say
    assert [key for key in here.keys() - anchored if not torch.equal(here[key], there[key])] == []
    for key, first in anchored.items():
        assert torch.equal(here[key][:, :, :first], there[key][:, :, :first])
        assert (here[key] - there[key]).abs().max() < RUN_TOLERANCE
    sums = [float(value.double().sum()) for value in here.values()]
    assert len(set(sums)) == len(sums) - 1, "the runs differ from each other, but for the two teachers, which are sampled alike"
