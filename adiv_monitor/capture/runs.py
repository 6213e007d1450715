"""The order in which modules run in a step, and where no gradient comes back to them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adiv_monitor.rerun.nested import tensors_in


class Run(NamedTuple):
    """The last run of a module in a step; with gradients enabled, if there is one.

    Attributes:
        at: increases with every run.
        enabled: whether gradients are enabled.
        carries: whether an input of this run, or of an earlier one, requires a gradient.
        after: its inputs can be computed by the runs before this one, `at` < `after`, and none of
            them requires a gradient. 0: they are not numbers, or one of them requires a gradient.
    """

    at: int
    enabled: bool
    carries: bool
    after: int


class Runs:
    """The modules that ran in a step, in the order of their last runs."""

    def __init__(self) -> None:
        self._runs: dict[nn.Module, Run] = {}
        self._count = 0

    def begins(
        self, module: nn.Module, given: Sequence[Any], around: Mapping[nn.Module, Sequence[Any]]
    ) -> None:
        """Record that a module runs.

        Args:
            module: the module.
            given: its arguments.
            around: the modules whose forward calls contain this one, with their arguments.
        """
        enabled, earlier = torch.is_grad_enabled(), self._runs.get(module)
        if earlier is not None and earlier.enabled and not enabled:
            return
        self._runs.pop(module, None)  # the order is that of the last runs
        self._count += 1
        inputs = [t for t in tensors_in(*given) if t.is_floating_point()]
        carries = enabled and any(t.requires_grad for t in inputs)
        carries = carries or (earlier is not None and earlier.carries)
        after = 0
        if enabled and not carries:
            after = max((self._made_before(t, around) for t in inputs), default=0)
        self._runs[module] = Run(self._count, enabled, carries, after)

    def _made_before(self, tensor: Tensor, around: Mapping[nn.Module, Sequence[Any]]) -> int:
        """Return the first run before which the tensor was there; the running one if unknown."""
        base = _base(tensor)
        for module, given in around.items():  # outermost first
            if module in self._runs and any(_base(other) is base for other in tensors_in(*given)):
                return self._runs[module].at
        return self._count

    def cut_off(self, reached: Mapping[nn.Module, bool]) -> list[nn.Module]:
        """Return the modules from whose outputs a later module got its input without a gradient.

        What only begins with the output of a module that a gradient reached is not cut off, but
        unused, such as a head that the loss does not see.

        Args:
            reached: whether a gradient reached a module's parameters; other modules do not count.
        """
        runs = self._runs
        last = max((run.after for module, run in runs.items() if reached.get(module)), default=0)
        found = []
        follows = False
        for module, run in runs.items():
            if module in reached:
                follows = not reached[module] and (follows or not run.carries)
                if follows and run.at < last:
                    found.append(module)
        return found


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base
