"""Sets up the process that runs Triton kernels in their interpreter."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from kernels.interpreter import repair_bf16

    repair_bf16()
