"""Times of steps that take turns, on a CPU or a GPU."""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TypeVar

import torch

Step = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)


def here() -> str:
    """Return the device of a benchmark that needs a GPU, but can be tried without one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def seconds(step: Step, device: str, calls: int = 20) -> float:
    """Return the seconds of one call; on CUDA the mean of several, between two events."""
    if device == "cpu":
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls / 1e3


def take_turns(
    steps: dict[Name, Step], rounds: int, device: str, calls: int = 20
) -> dict[Name, list[float]]:
    """Return the times of every step, one per round; the order rotates."""
    names = list(steps)
    times: dict[Name, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(seconds(steps[name], device, calls))
    return times


def copies(size: int) -> int:
    """Return the number of data sets of this size that exceeds the L2 cache in one pass."""
    if not torch.cuda.is_available():
        return 2
    return max(1, math.ceil(4 * torch.cuda.get_device_properties(0).L2_cache_size / size))


def in_a_graph(steps: Sequence[Step]) -> Step:
    """Capture all steps in one CUDA graph, after a warm-up; without a GPU just chain them."""

    def one_after_the_other() -> None:
        for step in steps:
            step()

    if not torch.cuda.is_available():
        one_after_the_other()
        return one_after_the_other
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles and allocates, which a capture cannot
        for _ in range(3):
            one_after_the_other()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_after_the_other()
    return partial(_replay, graph, steps)


def _replay(graph: torch.cuda.CUDAGraph, _kept: Sequence[Step]) -> None:
    """Replay the graph; the argument keeps the steps' data alive."""
    graph.replay()
