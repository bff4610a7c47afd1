"""The same runs on whichever host is there; as a script, on a given host, saved to a file for comparison.

python parity_runs.py HOST_CHECKOUT WORK_FOLDER OUT.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from tests_support import load_pack, start_host


def parity_runs(folder: Path) -> dict[str, Tensor]:
    """Name -> latents in model space, float32 on the CPU."""
    from fastar_pack.fastar_core.noise import seeded_normal
    from fastar_pack.fastar_core.policies import PolicySettings
    from fastar_pack.fastar_core.sigmas import SigmaSchedule
    from host.host_tools import load_from_file, prompt, stream, tiny_model
    from tiny.golden import load_golden

    levels = SigmaSchedule((1.0, 0.75, 0.5))
    model, text, other = tiny_model(), prompt(11), prompt(12)
    noise = seeded_normal(3, (1, 16, 7, 9, 12))
    golden = load_golden("A6")
    return {
        "full": stream(model, noise, text, block=3),
        "window": stream(model, noise, text, block=1, policy=PolicySettings("sink_window", 3, 1)),
        "guided": stream(model, noise, text, other, cfg=3.0, block=3),
        "prefix": stream(model, noise, text, block=3, prefix=noise[:, :, :1] / 2),
        "rolling": stream(model, noise, text, block=2, policy=PolicySettings("rolling", 7, 1), loop="rolling", schedule=levels),
        "from a file": stream(
            load_from_file(golden, folder),
            golden.tensors["noise"],
            golden.tensors["text.0"],
            schedule=golden.schedule,
            renoise=golden.renoise,
            block=3,
        ),
    }


def main(checkout: str, folder: str, target: str) -> None:
    torch.set_num_threads(1)
    load_pack()
    host = start_host(Path(checkout), Path(folder))
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in parity_runs(Path(folder)).items()}, target, {"version": host.version})


if __name__ == "__main__":
    main(*sys.argv[1:])
