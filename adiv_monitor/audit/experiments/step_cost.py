"""The cost of a training step, counted from its operators, independent of the machine's load."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from adiv_monitor.audit.training.batches import size_of
from adiv_monitor.audit.training.setup import Setup
from adiv_monitor.audit.training.train import train
from adiv_monitor.rerun.eager import forced_eager


class Speed(NamedTuple):
    """The speed of a usual machine.

    Attributes:
        flops: Multiplications and additions per second.
        entries: Tensor entries read or written per second.
        calls: Calls of torch's operators per second.
    """

    flops: float
    entries: float
    calls: float

    def seconds(self, flops: float, entries: float, calls: float) -> float:
        """Return the duration of an amount of work."""
        return flops / self.flops + entries / self.entries + calls / self.calls


# Rounded. One core of a server's processor is within a factor of 1.7 of it on seven networks, from
# an MLP of 2 ms a step to a VGG-11 of 4 s. For a GPU it is the order of magnitude.
CPU = Speed(flops=7e10, entries=2e9, calls=1e5)
GPU = Speed(flops=1e13, entries=2e11, calls=1e5)


def step_cost(setup: Setup) -> float:
    """Return the seconds of one training step on a usual machine, from its operators and sizes.

    flops / speed + entries / speed + calls / speed, counted in one step of a fork; if operators
    can't be counted, 6 multiplications and additions per parameter and sample.

    Raises:
        KeyboardInterrupt: The keyboard ended the step.
    """
    parameters = list(setup.model.parameters())
    speed = CPU if parameters[0].device.type == "cpu" else GPU
    counted = _Counted()
    try:
        with forced_eager(), counted:
            course = train(replace(setup, steps=1).fork())
    except Exception:  # an operator that a dispatch mode can't handle
        samples = max(size_of(setup.batches[0]), 1)
        return speed.seconds(6.0 * samples * sum(p.numel() for p in parameters), 0, 0)
    if course.interrupted:
        raise KeyboardInterrupt
    return speed.seconds(counted.flops, counted.entries, counted.calls)


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operators that run in its context, their flops and their tensor entries."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry  # imports triton, if that is there

        self._flops_of = flop_registry
        self.flops = self.entries = self.calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        result = func(*args, **given)
        self.calls += 1
        flops = self._flops_of.get(func._overloadpacket)
        if flops is not None:
            self.flops += int(flops(*args, **given, out_val=result))
        if not _is_view(func):
            leaves = tree_leaves((args, given, result))
            self.entries += sum(x.numel() for x in leaves if isinstance(x, Tensor))
        return result


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
