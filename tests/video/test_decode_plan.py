"""The decode plan: a pure decision with its reasons."""

from __future__ import annotations

import pytest

from fastar_pack.fastar_core.decode_plan import AT_END, BETWEEN, in_words, plan_decode
from fastar_pack.fastar_core.errors import ConfigError, GeometryError, MemoryPlanError

pytestmark = pytest.mark.cpu
GB = 10**9


@pytest.mark.parametrize(
    ("model", "kv", "decoder", "free", "mode"),
    [
        (3 * GB, 6 * GB, 5 * GB, 14 * GB, BETWEEN),  # to the byte
        (3 * GB, 6 * GB, 5 * GB, 14 * GB - 1, AT_END),
        (28 * GB, 6 * GB, 5 * GB, 24 * GB, AT_END),  # weights larger than the card: the host loads them partly
        (0, 0, 0, 0, BETWEEN),
    ],
)
def test_between_blocks_only_when_everything_fits(model: int, kv: int, decoder: int, free: int, mode: str) -> None:
    for forced in (None, "auto"):
        plan = plan_decode(model, kv, decoder, free, 240, forced)
        assert plan.mode == mode
        assert plan.numbers == {"model_bytes": model, "kv_bytes": kv, "decoder_bytes": decoder, "free_bytes": free,
                                "total_latent_frames": 240}


def test_the_reason_has_the_numbers_in_words() -> None:
    fits = plan_decode(3 * GB, 6_040_000_000, 5 * GB, 24 * GB, 21)
    for words in ("model 3 GB", "caches 6.04 GB", "decoder 5 GB", "14 GB", "24 GB", "fit"):
        assert words in fits.reason
    assert str(fits).startswith("decode between blocks: ")
    short = plan_decode(3 * GB, 6 * GB, 5 * GB, 12 * GB, 21)
    assert "exceed" in short.reason
    assert "by 2 GB" in short.reason
    assert "tiles" not in short.reason
    assert "tiles" in plan_decode(3 * GB, 1 * GB, 5 * GB, 4 * GB, 21).reason


def test_the_user_can_force_either() -> None:
    forced = plan_decode(3 * GB, 6 * GB, 5 * GB, 12 * GB, 21, BETWEEN)
    assert forced.mode == BETWEEN
    for words in ("chosen by you", "by 2 GB", "slow"):
        assert words in forced.reason
    assert "slow" not in plan_decode(3 * GB, 6 * GB, 5 * GB, 24 * GB, 21, BETWEEN).reason
    late = plan_decode(3 * GB, 6 * GB, 5 * GB, 24 * GB, 21, AT_END)
    assert late.mode == AT_END
    assert "chosen by you" in late.reason


def test_what_cannot_work_is_refused() -> None:
    for forced in (None, BETWEEN, AT_END):
        with pytest.raises(MemoryPlanError, match=r"69 GB.*24 GB.*window"):
            plan_decode(3 * GB, 69 * GB, 5 * GB, 24 * GB, 240, forced)
    with pytest.raises(ConfigError, match="sometimes"):
        plan_decode(1, 1, 1, 10, 3, "sometimes")
    with pytest.raises(GeometryError, match="longer length"):
        plan_decode(1, 1, 1, 10, 0)
    with pytest.raises(GeometryError, match="-5"):
        plan_decode(1, -5, 1, 10, 3)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (999, "999 B"), (287_539_200, "288 MB"), (6_038_323_200, "6.04 GB"), (1500, "1.5 kB"), (69 * GB, "69 GB")],
)
def test_bytes_in_words(count: int, words: str) -> None:
    assert in_words(count) == words
