"""The order in which modules run in a step, and where no gradient comes back to them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from adiv_monitor.rerun.nested import tensors_in


class Run(NamedTuple):
    """The last run of a module in a step; with gradients enabled, if there is one.

    Attributes:
        at: its begin, or its end where gradients are disabled; see `Runs.ran`.
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
    """The last runs of the modules that ran in a step."""

    def __init__(self) -> None:
        self._runs: dict[nn.Module, Run] = {}

    def ran(
        self,
        module: nn.Module,
        ended: int,
        began: int | None,
        given: Sequence[Any],
        around: Mapping[int, Sequence[Any]],
    ) -> None:
        """Record that a module has run.

        Args:
            module: the module.
            ended: a number that increases with every begin and every end of a run.
            began: this number when it began; None: gradients are disabled.
            given: its arguments.
            around: the arguments of the forward calls that contain this one, by their beginnings.
        """
        earlier = self._runs.get(module)
        if earlier is not None and earlier.enabled and began is None:
            return
        inputs = [t for t in tensors_in(*given) if t.is_floating_point()]
        carries = began is not None and any(t.requires_grad for t in inputs)
        carries = carries or (earlier is not None and earlier.carries)
        after = 0
        if began is not None and not carries:
            after = max((_made_before(t, began, around) for t in inputs), default=0)
        at = ended if began is None else began
        self._runs[module] = Run(at, began is not None, carries, after)

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


def _made_before(tensor: Tensor, began: int, around: Mapping[int, Sequence[Any]]) -> int:
    """Return the first beginning of a run before which the tensor was there."""
    base = _base(tensor)
    for number, given in around.items():  # outermost first
        if any(_base(other) is base for other in tensors_in(*given)):
            return number
    return began


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base
