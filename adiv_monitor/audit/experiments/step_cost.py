"""The cost of a training step, counted from its operators, independent of the machine's load."""

from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adiv_monitor.audit.training.batches import size_of
from adiv_monitor.audit.training.setup import Setup
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
UPDATE = 12  # calls of operators by which an optimizer updates a parameter, as Adam does


def counted(setup: Setup) -> tuple[float, bool]:
    """Return what a training step costs, and whether the loss fails without gradients.

    The cost is in seconds on a usual machine, flops / speed + calls / speed, counted in one forward
    pass of a copy. A backward pass is taken for two of them, and a step of the optimizer for
    `UPDATE` calls per parameter. If operators can't be counted, it is 6 multiplications and
    additions per parameter and sample.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports triton, if that is there

    parameters = list(setup.model.parameters())
    speed = CPU if parameters[0].device.type == "cpu" else GPU
    differentiates = False
    for with_gradients in (False, True):
        try:
            with (
                forced_eager(),
                torch.set_grad_enabled(with_gradients),
                FlopCounterMode(display=False) as flops,  # type: ignore[no-untyped-call]
                _Calls() as calls,
            ):
                setup.fork().first_loss()
        except Exception as error:  # or an operator that a dispatch mode can't handle
            if with_gradients or "does not require grad" not in str(error):
                break  # training says what else is wrong
            differentiates = True
        else:
            updates = UPDATE * len(parameters)
            cost = speed.seconds(3.0 * flops.get_total_flops(), 3.0 * calls.number + updates)
            return cost, differentiates
    samples = max(size_of(setup.batches[0]), 1)
    cost = speed.seconds(6.0 * samples * sum(p.numel() for p in parameters), 0)
    return cost, differentiates


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run in its context."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))
