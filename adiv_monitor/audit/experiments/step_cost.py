"""The cost of a training step, counted from its operators, independent of the machine's load."""

from dataclasses import replace
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

from adiv_monitor.audit.training.batches import size_of
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.rerun.eager import forced_eager


class Speed(NamedTuple):
    """The speed of a usual machine.

    Attributes:
        flops: Multiplications and additions per second.
        calls: Calls of torch's operators per second.
    """

    flops: float
    calls: float

    def seconds(self, flops: float, calls: float) -> float:
        """Return the duration of an amount of work."""
        return flops / self.flops + calls / self.calls


# Rounded: one core of a server's processor, whose time to read and write tensors is in the flops.
CPU = Speed(flops=4e10, calls=1e5)
GPU = Speed(flops=6e12, calls=1e5)


def step_cost(setup: Setup) -> float:
    """Return the seconds of one training step on a usual machine, from its operators and sizes.

    flops / speed + calls / speed, counted in one step of a fork; if operators can't be counted, 6
    multiplications and additions per parameter and sample.

    Raises:
        KeyboardInterrupt: The keyboard ended the step.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, if that is there

    parameters = list(setup.model.parameters())
    speed = CPU if parameters[0].device.type == "cpu" else GPU
    try:
        with forced_eager(), FlopCounterMode(display=False) as counted, _Calls() as calls:  # type: ignore[no-untyped-call]
            course = train(replace(setup, steps=1).fork())
    except Exception:  # an operator that a dispatch mode can't handle
        samples = max(size_of(setup.batches[0]), 1)
        return speed.seconds(6.0 * samples * sum(p.numel() for p in parameters), 0)
    if course.interrupted:
        raise KeyboardInterrupt
    return speed.seconds(counted.get_total_flops(), calls.number)


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run in its context."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))
