"""AnnSA for whole videos: own frame always visible, text dense both ways, unknown frame layouts, any size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from core.annsa_tools import SCHEDULE, SPARSE, dense, error
from fastar_pack.fastar_core.annsa import walk
from fastar_pack.fastar_core.annsa.video import VideoRows, VideoSparse

pytestmark = pytest.mark.cpu
EXACT = 1e-5
FRAMES, TOKENS, TEXT = 8, 32, 11


def qkv(rows: int, dim: int = 24, batch: int = 2, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, rows, 2, dim, generator=g) for _ in range(3))  # type: ignore[return-value]


def run(q: Tensor, k: Tensor, v: Tensor, video: VideoRows, **changes: object) -> tuple[Tensor | None, VideoSparse]:
    sparse = VideoSparse(replace(SPARSE, **changes), SCHEDULE)
    sparse.start_call(0.7, False)
    return sparse.attend_video(0, 0.7, q, k, v, video, dense), sparse


LAYOUTS = {"video": (VideoRows(0, FRAMES, TOKENS), FRAMES * TOKENS),
           "video then text": (VideoRows(0, FRAMES, TOKENS), FRAMES * TOKENS + TEXT),
           "text then video": (VideoRows(TEXT, FRAMES, TOKENS), FRAMES * TOKENS + TEXT), "unknown": (VideoRows(0, 0, 251), 251),
           "odd sizes": (VideoRows(0, 7, 15), 105)}


@pytest.mark.parametrize("buckets", ["kmeans", "sign"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dim", [12, 24, 128])
def test_density_one_is_dense(name: str, dim: int, buckets: str) -> None:
    video, rows = LAYOUTS[name]
    q, k, v = qkv(rows, dim)
    out, sparse = run(q, k, v, video, density=1.0, buckets=buckets)
    assert out is not None
    assert (out - dense(q, k, v)).abs().max() <= EXACT
    assert sparse.report()["calls"] == {"sparse": 1}


@pytest.mark.parametrize("name", ["video then text", "text then video"])
def test_text_rows_and_columns_stay_dense(name: str) -> None:
    video, rows = LAYOUTS[name]
    q, k, v = qkv(rows)
    out, sparse = run(q, k, v, video, density=0.4)
    assert out is not None
    text = torch.ones(rows, dtype=torch.bool)
    text[video.start:video.start + video.rows] = False
    assert (out[:, text] - dense(q, k, v)[:, text]).abs().max() <= EXACT
    assert sparse.report()["density"] <= 0.41
    k[:, text] += 20 * torch.nn.functional.normalize(q[:, ~text].mean(1, keepdim=True), dim=-1)
    v[:, ~text] = 0
    out, _ = run(q, k, v, video, density=0.4)
    truth = dense(q, k, v)
    assert error(out[:, ~text], truth[:, ~text]) < 0.5, "text keys are visible to every query"


def seen_frames(video: VideoRows, rows: int) -> Tensor:
    """bool [query frames, key frames]: values are one-hot frames, keys equal, so the output spells out what was visited."""
    q, k = torch.zeros(1, rows, 1, 16), torch.zeros(1, rows, 1, 16)
    q += 0.01 * torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    frame = torch.arange(rows) // video.tokens
    v = torch.nn.functional.one_hot(frame, 16).float()[None, :, None]
    out, _ = run(q, k, v, video, density=0.3, balance="layer")
    assert out is not None
    return (out[0, :, 0] > 1e-6).unflatten(0, (-1, video.tokens)).all(1)


def test_a_query_always_sees_its_own_frame() -> None:
    seen = seen_frames(VideoRows(0, FRAMES, TOKENS), FRAMES * TOKENS)
    assert bool(seen[:, :FRAMES].diagonal().all())
    assert not bool(seen[:, :FRAMES].all()), "at this density not all frames can be seen"


def test_forgetting_the_own_frame_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VideoSparse, "_must", staticmethod(lambda video, groups, buckets, device: torch.zeros(groups, buckets).bool()))
    true = walk.expected_mass
    monkeypatch.setattr(walk, "expected_mass", lambda *a: true(*a) * torch.linspace(1, 0, true(*a).shape[-1]))
    seen = seen_frames(VideoRows(0, FRAMES, TOKENS), FRAMES * TOKENS)
    assert not bool(seen[:, :FRAMES].diagonal().all())


def test_without_frames_the_nearest_rows_are_visible() -> None:
    rows = 251
    q, k, _ = qkv(rows, 16, 1)
    v = torch.arange(rows).float()[None, :, None, None].expand(1, rows, 2, 16).contiguous()
    q = 30 * torch.nn.functional.normalize(q, dim=-1)
    k = torch.nn.functional.normalize(q, dim=-1) * 4
    out, _ = run(q, k, v, VideoRows(0, 0, rows), density=0.3)
    assert out is not None
    assert (out[0, :, 0, 0] - torch.arange(rows)).abs().max() < 1, "each query finds the key that stands where it stands"


@pytest.mark.parametrize("case", ["equal keys", "zero keys", "tiny frames"])
def test_odd_rows_give_finite_answers(case: str) -> None:
    video, rows = (VideoRows(0, 24, 2), 48) if case == "tiny frames" else LAYOUTS["video"]
    q, k, v = qkv(rows, 12)
    if case == "equal keys":
        k = k[:, :1].expand_as(k).contiguous()
    elif case == "zero keys":
        k = torch.zeros_like(k)
    out, _ = run(q, k, v, video, density=0.5)
    assert out is not None
    assert out.isfinite().all()
    assert out.abs().max() <= v.abs().max() + EXACT


def test_reasons_of_dense_calls() -> None:
    q, k, v = qkv(TOKENS)
    assert run(q, k, v, VideoRows(0, 1, TOKENS))[1].report()["calls"] == {"dense: one frame": 1}
    q, k, v = qkv(2 * TOKENS)
    assert run(q, k, v, VideoRows(0, 2, TOKENS))[1].report()["calls"] == {"dense: always visible keys use up the density": 1}
    q, k, v = qkv(FRAMES * TOKENS)
    assert run(q, k, v, VideoRows(0, FRAMES, TOKENS), only_if_faster=True)[1].report()["calls"] == {
        "dense: sparse would not be 10 % faster": 1}
