"""gpu_check.py's small mode, so that it cannot rot; and the dispatcher of the benches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import bench
from gpu import correct, rollout, timing
from kernels.more_cases import CASES
from tests_support import PACK_ROOT

pytestmark = pytest.mark.cpu


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PACK_ROOT / "tests" / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=PACK_ROOT, check=False)


def test_the_small_mode_runs_every_part(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = script("gpu_check.py", "--cpu", "--seed", "7", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("gate: green")
    result = json.loads(file.read_text(encoding="utf-8"))
    assert result["gate"] == "green"
    assert {row["policy"] for row in result["rollout"]} == set(rollout.policies(rollout.SMALL))
    assert all(row["latent_frames"] == rollout.SMALL.frames for row in result["rollout"])
    timed = {row["what"] for row in result["timings"]}
    assert {"torch flash", "torch_fast dense with bias", "torch_fast ranges, density 0.125", "torch_fast compact"} <= timed
    ops = {row["case"].split(":")[0] for row in result["correctness"]}
    assert ops == {case.op for case in CASES}


def test_a_wrong_kernel_turns_the_gate_red_and_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of one op that answers with the bias left out."""
    from fastar_pack.kernels.torch_fast import attend as module

    right = module.attend
    monkeypatch.setattr(module, "attend", lambda q, k, v, bias=None, *rest, **options: right(q, k, v, None, *rest, **options))
    place = correct.Place(torch.device("cpu"), ("torch_fast",), seed=1)
    faults = [row for row in correct.check(place, [case for case in CASES if case.op == "attend"]) if row["fault"]]
    assert any("750" in row["case"] for row in faults)
    assert not any("one query, one key" in row["case"] for row in faults)


def test_executed_work_counts_whole_tiles() -> None:
    """256 rows in 4 buckets, 64 keys each: every bucket is padded to tiles of 128 rows."""
    size = timing.Size(256, 256, 2, 64)
    _, tiles = timing.bucketed(size, 4, 128, torch.device("cpu"), "torch_fast")
    used = int((tiles.row_count > 0).sum())
    assert used >= 8
    assert timing.executed_flop(tiles, size, 128, 64) == used * 128 * 64 * 4 * 64
    assert timing.executed_flop(tiles, size, 128, 128) == 2 * timing.executed_flop(tiles, size, 128, 64)
    assert int(tiles.executed_pairs()) == 256 * 64 * 2


def test_the_dispatcher_lists_and_runs_benches(tmp_path: Path) -> None:
    listed = script("bench.py").stdout
    for name in ("families", "kernels", "rollout", "tempcache"):
        assert f"\n  {name} " in listed
    file = tmp_path / "result.json"
    done = script("bench.py", "kernels", "--size", "1,64,256,32", "--dtypes", "float32", "--repeats", "1", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(file.read_text(encoding="utf-8"))
    assert set(result) == {"name", "machine", "gate", "rows", "targets"}
    assert result["gate"] == "green"
    by_name = {target["name"]: target for target in result["targets"]}
    assert by_name["extra launches per layer and step"]["holds"]
    if not torch.cuda.is_available():
        speed = by_name["range kernel, TFLOP/s of executed work"]
        assert (speed["holds"], speed["value"]) == (None, None)
        assert "no CUDA GPU" in speed["reason"]


def test_a_red_gate_lets_no_figure_out() -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("bench_dispatcher", Path(bench.__file__).parents[1] / "bench.py")
    assert spec is not None
    assert spec.loader is not None
    dispatcher = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(dispatcher)
    target = {"name": "speed", "value": 77.5, "target": ">= 2", "holds": True, "reason": None}
    result: dict[str, Any] = {"name": "x", "gate": "green", "rows": [{"ratio": 77.5}, {"check": "dense", "error": 1.0}]}
    result["targets"] = [target]
    assert dispatcher.guarded(result)["targets"] == [target]
    red = dispatcher.guarded({**result, "gate": "red"})
    assert red["rows"] == [{"check": "dense", "error": 1.0}]
    assert red["targets"][0]["value"] is None
    assert red["targets"][0]["holds"] is None
    assert "red" in red["targets"][0]["reason"]
    assert "77" not in dispatcher.in_words(red)
