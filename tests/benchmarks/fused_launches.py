"""Kernel launches of a measured step with fused kernels, counted without a GPU.

Triton's interpreter runs the kernels on CPU tensors. Each counts as one launch; operations inside
the interpreter do not count. A program gets larger tiles than on a GPU, which changes no count.
launches.py runs this script in a separate process and reads its JSON.

    TRITON_INTERPRET=1 python tests/benchmarks/fused_launches.py MODEL ...
"""

import contextlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from adiv_layers.kernels import choice as devices
from adiv_layers.kernels.launch import power_of_two
from launches import Launches, count_task
from models import TASKS
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

ROOMS = ("looks", "moments", "products", "steps", "totals")


def large_tile(view: Tensor) -> tuple[int, int]:
    """Return larger tiles than `looks._tile`, which this replaces."""
    _, positions, width = view.shape
    return min(2**13, power_of_two(positions)), min(2**8, power_of_two(width))


# Larger tiles by module: the interpreter's time depends on programs, not on entries.
LARGE: dict[str, dict[str, Any]] = {
    "looks": {"_tile": large_tile},
    "moments": {"_TILE": 2**16},
    "products": {"_TILE": 2**13},
}
LARGE["steps"] = {"_BLOCK": 2**18, "_CHUNK": 2**18}


@contextlib.contextmanager
def kernels_on_cpu(launched: Callable[[str], None]) -> Iterator[None]:
    """Let the kernels take CPU tensors; call `launched` with the name of each that starts."""
    assert os.environ.get("TRITON_INTERPRET") == "1"  # otherwise they need a GPU

    def telling(run: Callable[..., None]) -> Callable[..., None]:
        def told(kernel: Any, *arguments: Any, **options: Any) -> None:
            launched(kernel.fn.__name__)
            with _disable_current_modes():
                run(kernel, *arguments, **options)

        return told

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(devices, "DEVICES", {"cpu"}))
        # This `run` is the counting one.
        stack.enter_context(mock.patch.object(devices, "_get_current_dispatch_mode", lambda: None))
        for name in ROOMS:
            room = importlib.import_module(f"adiv_monitor.kernels.{name}")
            changed = {"run": telling(room.run), **LARGE.get(name, {})}
            stack.enter_context(mock.patch.multiple(room, **changed))
        yield


def count(name: str) -> dict[str, Any]:
    """Return a measured step's kernels, its number of layers, and the places that launch."""
    active: list[Launches] = []

    def launched(kernel: str) -> None:
        if active:
            active[-1].launched(f"kernel {kernel}")

    with kernels_on_cpu(launched):
        found, layers = count_task(TASKS[name], {"every_n_steps": 1}, active.append)
    return {"kernels": found.kernels, "layers": layers, "places": found.places.most_common()}


def main(chosen: Sequence[str]) -> None:
    torch.set_num_threads(1)
    print(json.dumps({name: count(name) for name in chosen}))


if __name__ == "__main__":
    main(sys.argv[1:])
