"""Whatever ends a run early leaves nothing behind: exception types stay, files are closed, memory is free, reruns fresh."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from host.stream_parts import CountingCalls, sample, tiny_model, tiny_wan_vae
from tests_support import Host

pytestmark = pytest.mark.cpu
Parts = tuple[Any, Any]


@pytest.fixture
def parts(host: Host) -> Iterator[tuple[Any, Any]]:
    from comfy import model_management

    yield tiny_model(), tiny_wan_vae()
    model_management.interrupt_current_processing(False)


def tracked(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """Weak references to every run state, job and decoder made from now on, and to the tensors of the start noise."""
    from fastar_pack.nodes.host import sampling, stream_job, vae_probe

    made: list[weakref.ref[Any]] = []

    def watch(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def make(*args: Any, **kwargs: Any) -> Any:
            thing = plain(*args, **kwargs)
            made.append(weakref.ref(thing))
            return thing

        monkeypatch.setattr(owner, name, make)

    for owner, name in ((sampling, "RunState"), (stream_job, "draw_noise"), (vae_probe, "StreamDecoder"),
                        (stream_job, "StreamGuider"), (stream_job, "StreamProgress"), (sampling, "HostModel")):
        watch(owner, name)
    return made


def live_tensor_bytes() -> int:
    gc.collect()
    return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if isinstance(t, torch.Tensor))


class BrokenError(RuntimeError):
    pass


def interrupt() -> None:
    from comfy import model_management

    model_management.interrupt_current_processing(True)


def fail() -> None:
    raise BrokenError("broken on purpose")


def at_call(number: int, action: Callable[[], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        CountingCalls(monkeypatch).at[number] = action

    return install


def in_place(owner: str, name: str, number: int, action: Callable[[], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Acts before call ``number`` (from 0) of a method of the pack."""

    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        import importlib

        module, _, cls = owner.rpartition(".")
        holder = getattr(importlib.import_module(f"fastar_pack.{module}"), cls)
        plain, seen = getattr(holder, name), []

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            seen.append(1)
            if len(seen) == number + 1:
                action()
            return plain(*args, **kwargs)

        monkeypatch.setattr(holder, name, wrapped)

    return install


def in_decode(number: int, action: Callable[[], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Acts before push ``number`` (from 0) into the decoder of the run; the probe before it is not counted."""

    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        from fastar_pack.nodes.host import stream_job

        plain = stream_job.choose_decoder

        def choose(*args: Any) -> Any:
            decoder = plain(*args)
            push, seen = decoder.push, []

            def wrapped(latents: torch.Tensor) -> torch.Tensor:
                seen.append(1)
                if len(seen) == number + 1:
                    action()
                return push(latents)

            decoder.push = wrapped
            return decoder

        monkeypatch.setattr(stream_job, "choose_decoder", choose)

    return install


CASES = {
    "interrupt in the first call": at_call(0, interrupt),
    "interrupt in a later step": at_call(3, interrupt),
    "interrupt in the clean pass": at_call(4, interrupt),
    "interrupt in the second block": at_call(6, interrupt),
    "interrupt in the first decode": in_decode(0, interrupt),
    "interrupt in the last decode": in_decode(1, interrupt),
    "interrupt in a write": in_place("nodes.host.video_file.VideoSink", "write", 0, interrupt),
    "error in the first call": at_call(0, fail),
    "error in the clean pass": at_call(4, fail),
    "error in a decode": in_decode(1, fail),
    "error in a write": in_place("nodes.host.video_file.VideoSink", "write", 1, fail),
    "error in the cache": in_place("fastar_core.policies.frame_cache.FrameCache", "attend", 7, fail),
    "error in the preview": in_place("nodes.host.preview.StreamProgress", "step", 2, fail),
}


@pytest.fixture(scope="module")
def fresh(host: Host) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents and last pictures of a run with new objects, before any fault."""
    return sample(host, tiny_model(), tiny_wan_vae(), frames_to="file")[:2]


@pytest.mark.parametrize("name", CASES)
def test_faults_leave_nothing_behind(name: str, host: Host, parts: Parts, fresh: tuple[torch.Tensor, torch.Tensor]) -> None:
    from comfy.model_management import InterruptProcessingException

    before = live_tensor_bytes()
    with pytest.MonkeyPatch.context() as patch:
        made = tracked(patch)
        CASES[name](patch)
        wanted = InterruptProcessingException if name.startswith("interrupt") else BrokenError
        with pytest.raises(wanted) as caught:
            sample(host, *parts, frames_to="file")
        assert type(caught.value) is wanted
        assert len(made) > 3
        del caught
    gc.collect()
    assert [reference() for reference in made if reference() is not None] == []
    assert live_tensor_bytes() <= before
    again = sample(host, *parts, frames_to="file")
    assert torch.equal(again[0], fresh[0])
    assert torch.equal(again[1], fresh[1])


def test_a_kept_tensor_would_be_noticed(host: Host, parts: tuple[Any, Any]) -> None:
    sample(host, *parts)
    before = live_tensor_bytes()
    kept = sample(host, *parts)
    assert live_tensor_bytes() > before
    del kept


def test_an_interrupt_is_obeyed_within_one_model_call(host: Host, parts: tuple[Any, Any]) -> None:
    from comfy.model_management import InterruptProcessingException

    for number in (0, 4, 5):
        with pytest.MonkeyPatch.context() as patch:
            calls = CountingCalls(patch)
            calls.at[number] = interrupt
            with pytest.raises(InterruptProcessingException):
                sample(host, *parts)
            assert len(calls.batches) == number + 1


def test_an_interrupt_closes_and_names_the_file(host: Host, parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch,
                                                caplog: pytest.LogCaptureFixture) -> None:
    from comfy.model_management import InterruptProcessingException
    from comfy_api.latest._input_impl import VideoFromFile

    at_call(8, interrupt)(monkeypatch)
    at = host.base / "output" / "stop"
    with caplog.at_level(logging.WARNING), pytest.raises(InterruptProcessingException) as caught:
        sample(host, *parts, length=33, frames_to="file", filename_prefix="stop/clip")
    assert str(caught.value) == ""
    (path,) = at.iterdir()
    assert len(VideoFromFile(str(path)).get_components().images) == 9
    assert f"9 frames are safe in {path}" in caplog.text


def test_an_error_names_the_file_and_keeps_the_latents(host: Host, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    from comfy_api.latest._input_impl import VideoFromFile

    import nodes as host_nodes

    whole = sample(host, *parts, length=33)[0]
    in_decode(2, fail)(monkeypatch)
    with pytest.raises(BrokenError) as caught:
        sample(host, *parts, length=33, frames_to="file", filename_prefix="err/clip")
    files = {path.suffix: path for path in (host.base / "output" / "err").iterdir()}
    assert set(files) == {".mp4", ".latent"}
    assert all(str(path) in str(caught.value) for path in files.values())
    shown = len(VideoFromFile(str(files[".mp4"])).get_components().images)
    Path(host.base / "input" / "kept.latent").write_bytes(files[".latent"].read_bytes())
    kept = host_nodes.LoadLatent().load("kept.latent")[0]["samples"]
    assert torch.equal(kept, whole[:, :, :kept.shape[2]])
    assert (kept.shape[2], shown) == (9, 21)


def test_a_full_disk_is_explained(host: Host, parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    from fastar_pack.fastar_core.errors import FastARError
    from fastar_pack.nodes.host import video_file

    seen: list[int] = []

    def full(descriptor: int) -> None:
        seen.append(descriptor)
        if len(seen) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(video_file.os, "fsync", full)
    with pytest.raises(FastARError, match="disk is full") as caught:
        sample(host, *parts, length=33, frames_to="file", filename_prefix="full/clip")
    monkeypatch.undo()
    path = next((host.base / "output" / "full").glob("*.mp4"))
    assert str(path) in str(caught.value)


def test_a_cached_output_sampled_again_is_fresh(host: Host, parts: tuple[Any, Any]) -> None:
    sampler = host.nodes["FastARSampler"]().make("self_forcing", "preset", 9, 3)[0]
    from host.test_plain_sampler import through_host

    first = through_host(parts[0], sampler, seed=1)
    second = through_host(parts[0], sampler, seed=2)
    unused = host.nodes["FastARSampler"]().make("self_forcing", "preset", 9, 3)[0]
    assert torch.equal(second, through_host(tiny_model(), unused, seed=2))
    assert not torch.equal(first, second)
