"""The FlashInfer back-end up to the call of its kernel: requests, places of rows, bias, log base. And its variant compiles.

The kernel itself needs a GPU. In its place stands a plain implementation of what FlashInfer documents for a ragged call.
"""

from __future__ import annotations

import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from fastar_pack.kernels.flashinfer import attend, attend_ranges, probe, ragged, variant, why_not_here
from kernels.compare import TOLERANCE, fault, widened
from kernels.more_cases import CASES, Case

pytestmark = pytest.mark.cpu


class Ragged:
    """The documented behaviour: requests by row borders, one head, logits + bias before the scale, log sums in base 2."""

    def plan(self, q_borders: torch.Tensor, k_borders: torch.Tensor, heads: int, kv_heads: int, dim: int, **kinds: Any) -> None:
        assert q_borders.dtype == k_borders.dtype == torch.int32
        assert (heads, kv_heads) == (1, 1)
        assert not kinds.pop("causal")
        assert {name: str(kind) for name, kind in kinds.items()} == dict.fromkeys(kinds, str(kinds["q_data_type"]))
        self.borders = list(zip(q_borders.tolist(), q_borders[1:].tolist(), k_borders.tolist(), k_borders[1:].tolist()))

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, key_bias: torch.Tensor, scale: float, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert q.shape[1:] == k.shape[1:] == v.shape[1:]
        assert (len(q), len(k)) == (self.borders[-1][1], self.borders[-1][3])
        assert len(key_bias) == len(k)
        out, lse = torch.empty_like(q), torch.empty(len(q), 1)
        for q_lo, q_hi, k_lo, k_hi in self.borders:
            assert q_hi > q_lo
            assert k_hi > k_lo
            logits = q[q_lo:q_hi, 0].double() @ k[k_lo:k_hi, 0].double().T + key_bias[k_lo:k_hi].double()
            out[q_lo:q_hi, 0] = ((logits * scale).softmax(-1) @ v[k_lo:k_hi, 0].double()).to(q.dtype)
            lse[q_lo:q_hi, 0] = torch.logsumexp(logits * scale, -1) / math.log(2)
        return out, lse


FITTING = [case for case in CASES if case.op in ("attend", "attend_ranges") and "dimension 80" not in case.why
           and "dimension 40" not in case.why]  # fmt: skip


@pytest.mark.parametrize("case", FITTING, ids=lambda case: case.name)
def test_calls_are_folded_into_requests(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastar_pack.kernels import registry

    monkeypatch.setattr(ragged, "wrapper", lambda *key: Ragged())
    module = {"attend": attend, "attend_ranges": attend_ranges}[case.op]
    args = case.args(torch.float16)
    assert module.why_not(*args) is None
    got = getattr(module, case.op)(*args, return_lse=True)
    want = registry.call(case.op, "reference", *widened(args), return_lse=True)
    assert fault(case.op, args, got, want, TOLERANCE[torch.float16]) is None


def test_what_it_refuses() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert "the tensors are on cpu" in str(why_not_here(cpu, True))
    assert "only when asked for" in str(why_not_here(cuda, False))
    q = torch.zeros(1, 2, 2, 64)
    assert attend.why_not(q, q, q) == "it takes float16, bfloat16, the call has float32"
    q = torch.zeros(1, 2, 2, 80).half()
    assert attend.why_not(q, q, q) == "it wants a head dimension of 64, 128 or 256"


def test_a_machine_without_a_compiler_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import fastar_pack.kernels.flashinfer as package

    monkeypatch.setattr(package.importlib, "import_module", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert "there is no nvcc" in str(probe())


lane = pytest.mark.skipif(
    os.environ.get("FASTAR_LANE_KIND") != "flashinfer", reason="compiles with nvcc: a lane of its own"
)
GENERATIONS = os.environ.get("FASTAR_FLASHINFER", "fa2").split(",")


@lane
@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_variant_compiles(generation: str, tmp_path: Path) -> None:
    """The object with the ragged kernel, bf16, head dimension 128 (fa2: about 15 s; fa3 by FASTAR_FLASHINFER=fa2,fa3: 80 s)."""
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(tmp_path)
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "9.0a" if generation == "fa3" else "8.0"
    from flashinfer.jit.attention.modules import gen_customize_batch_prefill_module

    spec = gen_customize_batch_prefill_module(
        generation, *variant.jit_args(generation, torch.bfloat16, 128), **variant.jit_kwargs(generation)
    )
    spec.write_ninja()
    build = next(tmp_path.rglob("build.ninja"))
    objects = [word.rstrip(":") for line in build.read_text(encoding="utf-8").splitlines() if line.startswith("build ")
               for word in line.split()[1:2]]  # fmt: skip
    ragged_object = next(name for name in objects if "ragged" in name and "mask_0" in name)
    done = subprocess.run(["ninja", "-f", str(build), ragged_object], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
