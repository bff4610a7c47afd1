"""The status node tells the truth about this machine, inside of a real host."""

from __future__ import annotations

import pytest

from tests_support import Host

pytestmark = pytest.mark.cpu


def test_the_text_names_host_device_and_every_back_end(host: Host) -> None:
    shown = host.nodes["FastARStatus"]().status()
    text = shown["result"][0]
    assert shown["ui"]["text"] == [text]
    assert f"ComfyUI {host.version}" in text
    assert "device: cpu" in text
    assert "kernels: torch_fast (not used: triton: it runs on CUDA devices, the tensors are on cpu" in text
    for name in ("triton", "flashinfer", "torch_fast", "reference"):
        assert f"\n{name}: " in text
    assert "\n    attend_ranges: no limits" in text
