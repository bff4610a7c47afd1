"""Checks and measures the kernels on the GPU at hand: `python tests/gpu_check.py` (any CUDA machine with torch and Triton).

Correctness of every op against float64 first; timings and a rollout only when that is green. Ends with one table; at most nine
minutes. Without a GPU, or with --cpu, the same steps run small with what the CPU has. For reads and writes out of bounds:
`compute-sanitizer --tool memcheck python tests/gpu_check.py --only correctness`.
"""

from __future__ import annotations

import argparse
import json
import platform
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests_support import load_pack

load_pack()

from gpu import correct, rollout, timing  # noqa: E402  they import the pack by the name it was just given

PARTS = ("correctness", "timings", "rollout")
SECONDS = {"correctness": 150.0, "rollout": 60.0}


def machine(device: torch.device) -> str:
    """What ran: device, its driver side, torch and Triton."""
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return f"{name}, torch {torch.__version__}, Triton {version}, {time.strftime('%Y-%m-%d')}"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="small sizes on the CPU, even where there is a GPU")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--backend", action="append", default=[], help="check this back-end; may be repeated")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--seed", type=int, help="the seed of an earlier run; a fresh one otherwise")
    return parser.parse_args()


def timings(device: torch.device, backends: tuple[str, ...]) -> list[dict[str, Any]]:
    """torch beside ours, tile shapes, the small ops."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows: list[dict[str, Any]] = []
    for size in timing.sizes(device):
        rows += timing.dense(size, device, dtype)
        for backend in backends:
            rows += timing.ours(size, device, dtype, backend)
    first = timing.sizes(device)[0]
    if "triton" in backends and device.type == "cuda":
        rows += timing.tile_shapes(first, device, dtype)
    for backend in backends:
        rows += timing.small_ops(first, device, dtype, backend)
    return rows


def as_table(rows: list[dict[str, Any]]) -> str:
    """Plain columns in the order in which keys first appear."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = [keys] + [[_cell(row.get(key)) for key in keys] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(keys))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip() for line in cells)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    """0 = every check was right."""
    given = options()
    device = torch.device("cpu" if given.cpu or not torch.cuda.is_available() else "cuda")
    seed = secrets.randbelow(2**31) if given.seed is None else given.seed
    torch.manual_seed(seed)
    wanted = tuple(PARTS if given.only is None else (given.only,))
    backends = correct.backends_for(device, tuple(given.backend))
    result: dict[str, Any] = {"name": "gpu_check", "machine": machine(device), "seed": seed, "gate": "not checked"}
    print(f"{result['machine']}; back-ends {', '.join(backends)}", flush=True)
    say = lambda text: print(text, flush=True)  # noqa: E731
    if "correctness" in wanted:
        result["correctness"] = correct.run(correct.Place(device, backends, seed, SECONDS["correctness"]), say)
        result["gate"] = "red" if any(row["fault"] for row in result["correctness"]) else "green"
    if result["gate"] != "red":
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        if "rollout" in wanted:
            result["rollout"] = rollout.run(device, dtype, SECONDS["rollout"], say)
        if "timings" in wanted:
            result["timings"] = timings(device, backends)
    if given.json:
        given.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    for part in ("rollout", "timings"):
        if part in result:
            print(f"\n{part}, correctness {result['gate']}\n{as_table(result[part])}")
    print(f"\ngate: {result['gate']}")
    return 1 if result["gate"] == "red" else 0


if __name__ == "__main__":
    sys.exit(main())
