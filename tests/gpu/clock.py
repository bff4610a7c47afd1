"""Time of a call: device time by events on a GPU, wall time elsewhere; and the time the host needs to start it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def seconds(call: Callable[[], Any], device: torch.device, repeats: int = 10) -> float:
    """Minimum over ``repeats`` after one call to warm up (which may compile)."""
    call()
    if device.type != "cuda":
        return min(_wall(call) for _ in range(repeats))
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return min(times)


def host_seconds(call: Callable[[], Any], device: torch.device, launches: int = 200) -> float:
    """Wall time per call until it returns, averaged; the device works behind."""
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(launches):
        call()
    return (time.perf_counter() - begun) / launches


def graph_seconds(call: Callable[[], Any], device: torch.device) -> float | None:
    """Time of a replay of the call as one CUDA graph; None where there are no graphs."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return seconds(graph.replay, device)


def _wall(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
