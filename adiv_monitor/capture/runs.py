"""The order in which modules run in a step, and where no gradient comes back to them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from adiv_monitor.rerun.nested import tensors_in


class Run(NamedTuple):
    """The last run of a module in a step; with gradients enabled, if there is one.

    Attributes:
        at: its begin, or its end where gradients are disabled.
        enabled: whether gradients are enabled.
        carries: whether an input of this run, or of an earlier one, requires a gradient.
        after: its inputs can be computed by the runs before this one, `at` < `after`, and none of
            them requires a gradient. 0: they are not numbers, or one of them requires a gradient.
    """

    at: int
    enabled: bool = False
    carries: bool = False
    after: int = 0


class Runs:
    """The last runs of the modules that ran in a step."""

    def __init__(self) -> None:
        self._runs: dict[nn.Module, Run] = {}

    def ran_without_gradients(self, module: nn.Module, ended: int) -> None:
        """Record that a module has run; `ended` increases with every begin and end of a run."""
        earlier = self._runs.get(module)
        if earlier is None or not earlier.enabled:
            self._runs[module] = Run(ended)

    def ran(
        self, module: nn.Module, began: int, given: Sequence[Any], outermost: int, first: Any
    ) -> None:
        """Record that a module has run.

        Args:
            module: the module.
            began: the number of its begin.
            given: its arguments.
            outermost: the number of the begin of the outermost module that runs.
            first: the arguments of that module.
        """
        inputs = [t for t in tensors_in(*given) if t.is_floating_point()]
        earlier = self._runs.get(module)
        carries = earlier is not None and earlier.carries
        carries = carries or any(t.requires_grad for t in inputs)
        there = {id(_base(t)) for t in tensors_in(first)}
        begins = [outermost if id(_base(t)) in there else began for t in inputs]
        after = 0 if carries else max(begins, default=0)
        self._runs[module] = Run(began, True, carries, after)

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
        for module, run in sorted(runs.items(), key=lambda item: item[1].at):
            if module in reached:
                follows = not reached[module] and (follows or not run.carries)
                if follows and run.at < last:
                    found.append(module)
        return found


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base
