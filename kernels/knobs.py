"""Environment switches of the kernels, all in one place. Read at each use, so that a test or a user can change them."""

from __future__ import annotations

import os

BACKEND = "FASTAR_BACKEND"  # auto, triton, flashinfer, torch_fast, reference
SCORE_MIB = "FASTAR_SCORE_MIB"  # largest score matrix torch_fast may build, MiB
DESCRIPTORS = "FASTAR_TRITON_DESCRIPTORS"  # 1: key tiles of triton come through tensor descriptors (sm_90 and later)


def score_bytes() -> int:
    """Bytes of scores that torch_fast may hold at once."""
    text = os.environ.get(SCORE_MIB, "256")
    try:
        mib = float(text)
    except ValueError:
        mib = 0.0
    if mib <= 0:
        raise ValueError(f"{SCORE_MIB}={text!r}: expected a number of MiB above 0, for example 256")
    return int(mib * 2**20)


def descriptors() -> bool:
    return os.environ.get(DESCRIPTORS, "0") == "1"
