"""The run object: errors in words, counts, and nothing left behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from core.engine_tools import FULL, Probe, random_qkv, window
from fastar_pack.fastar_core.attention import Attention
from fastar_pack.fastar_core.context import Phase
from fastar_pack.fastar_core.errors import FastARError
from fastar_pack.fastar_core.policies.frame_cache import FrameCache
from fastar_pack.kernels.registry import BackendError

pytestmark = pytest.mark.cpu


def test_a_policy_outside_of_a_call_is_refused() -> None:
    probe = Probe(FULL, 9, 3)
    with pytest.raises(FastARError, match="outside a block of the FAST-AR driver"):
        probe.run.policy("p")
    probe.block(0, 3)
    with pytest.raises(FastARError, match="outside a block"):
        probe.run.policy("p")


def test_end_without_begin_is_refused() -> None:
    with pytest.raises(FastARError, match="without begin"):
        Probe(FULL, 9, 3).run.end()


def test_a_call_that_never_reached_attention_is_an_error() -> None:
    probe = Probe(FULL, 9, 3)
    probe.block(0, 3)
    probe.run.begin(probe.ctx("denoise", 3, 3))
    with pytest.raises(FastARError, match=r"denoise call over latent frames 3\.\.5 never reached.*after that node"):
        probe.run.end()


def test_only_branches_of_the_call_commit() -> None:
    probe = Probe(FULL, 9, 3)
    probe.block(0, 3)
    other = probe.ctx("denoise", 0, 3)
    probe.run.begin(other)
    probe.run.policy("late")
    probe.run.end()
    assert probe.policy.end == 3
    assert probe.run._policies["late"].end == 0


def test_a_call_is_planned_once_per_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    plain = FrameCache.begin
    monkeypatch.setattr(FrameCache, "begin", lambda self, ctx: planned.append(ctx.start) or plain(self, ctx))
    probe = Probe(FULL, 9, 3)
    ctx = probe.ctx("denoise", 0, 3)
    probe.run.begin(ctx)
    policies = [probe.run.policy(branch) for branch in ("p", "n", "p", "n", "p")]
    assert len(planned) == len(set(map(id, policies))) == 2
    probe.run.end()
    probe.block(0, 3)
    assert len(planned) == 4


@pytest.mark.parametrize(("phase", "end"), [("denoise", 0), ("clean", 3), ("prefill", 3)])
def test_what_a_commit_makes_permanent(phase: Phase, end: int) -> None:
    probe = Probe(FULL, 9, 3)
    ctx = probe.ctx(phase, 0, 3)
    probe.run.begin(ctx)
    policy = probe.run.policy("p")
    policy.commit(ctx)
    assert policy.end == end
    assert policy.committed_frames() == tuple(range(end))


def test_report_counts_what_happened() -> None:
    probe = Probe(window(6), 9, 3)
    for start in (0, 3, 6):
        probe.block(start, 3)
    report = probe.run.report()
    assert report["model_calls"] == {"denoise": 3, "clean": 3}
    assert report["branches"] == 1
    assert report["policy"] == "sink_window"
    assert report["cache_bytes"] == probe.run.bytes() > 0
    assert report["cache_peak_bytes"] >= report["cache_bytes"]


def test_close_frees_every_tensor_and_undoes_in_reverse_order() -> None:
    probe = Probe(FULL, 9, 3)
    undone: list[str] = []
    probe.run.on_close(lambda: undone.append("first"))
    probe.run.on_close(lambda: undone.append("second"))
    probe.block(0, 3)
    held, keys = probe.policy, weakref.ref(probe.policy._keys[0])
    probe.run.begin(probe.ctx("denoise", 3, 3))
    probe.run.attention.dense = lambda q, k, v: q
    assert keys() is not None
    probe.run.close()
    gc.collect()
    assert keys() is None, "even though somebody still holds the policy"
    assert held.committed_frames() == ()
    assert undone == ["second", "first"]
    assert probe.run.bytes() == 0
    assert probe.run.attention.dense is None
    probe.run.close()
    assert undone == ["second", "first"]
    with pytest.raises(FastARError, match="outside a block"):
        probe.run.policy("p")


def test_dense_work_goes_to_the_hosts_attention_and_biased_work_to_ours() -> None:
    q, k, v = random_qkv(0, 8)
    attention = Attention()
    plain = attention.attend(q, k, v)
    attention.dense = lambda *qkv: torch.full_like(q, 7.0)
    assert torch.equal(attention.attend(q, k, v), torch.full_like(q, 7.0))
    assert (attention.attend(q, k, v, torch.zeros(1, 1, 8)) - plain).abs().max() < 1e-6
    assert (attention.attend(q, k, v, torch.arange(8.0)[None, None]) - plain).abs().max() > 1e-2


def test_the_chosen_back_end_is_used() -> None:
    q, k, v = random_qkv(0, 8)
    with pytest.raises(BackendError, match="'fancy' is unknown"):
        Attention("fancy").attend(q, k, v)
    assert (Attention("reference").attend(q, k, v) - Attention("torch_fast").attend(q, k, v)).abs().max() < 1e-6
