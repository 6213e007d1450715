"""Steps of other optimizers than the monitor's while a step is armed."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, optimizer
from torch.utils.hooks import RemovableHandle

from adiv_monitor.rerun.surroundings import version
from adiv_monitor.step.failures import Failures

# After this many steps of other optimizers, without one of its own, an armed step is dropped.
_TOO_MANY = 3


class Others:
    """Follows the steps of all optimizers, by torch's global hooks.

    Steps within the monitor's own optimizer's step, and after it, are a part of it.

    Args:
        own: the monitor's optimizer; None: it has none, and other steps are of no interest.
        parameters: the parameters whose versions are compared before and after a step.
        failures: handler of exceptions.

    Attributes:
        begun: number of all steps, of any optimizer, that have begun.
        writes: class names of the other optimizers that stepped, and how many of their steps wrote
            to the parameters.
    """

    def __init__(
        self,
        own: Optimizer | None,
        parameters: Sequence[Tensor],
        failures: Failures,
    ) -> None:
        self.begun = 0
        self.writes = Counter[str]()
        self._own = own
        self._has_begun = own is None  # the monitor's optimizer
        self._parameters = parameters
        self._failures = failures
        self._drop: Callable[[], object] = _nothing
        self._before: list[int] | None = None
        self._handles: list[RemovableHandle] = []

    def follow(self, overtaken: Callable[[], object]) -> None:
        """Put the hooks on; call `leave` afterwards, even if this raises.

        Args:
            overtaken: called once, if other optimizers take the steps.
        """
        self._drop = overtaken
        me = weakref.ref(self)  # torch keeps the hooks, also of a monitor that nobody closes

        def guarded(body: Callable[["Others", Optimizer], None]) -> Callable[..., None]:
            def hook(stepping: Optimizer, *args: Any) -> None:
                if (others := me()) is not None:
                    others._failures.safely(body, others, stepping)

            return hook

        handles = self._handles
        handles.append(optimizer.register_optimizer_step_pre_hook(guarded(Others._begins)))
        handles.append(optimizer.register_optimizer_step_post_hook(guarded(Others._ends)))
        weakref.finalize(self, _remove, handles)

    def leave(self) -> None:
        """Remove the hooks."""
        self._drop = _nothing
        _remove(self._handles)

    def _begins(self, stepping: Optimizer) -> None:
        self.begun += 1
        self._has_begun |= stepping is self._own
        self._before = None if self._has_begun else self._versions()

    def _ends(self, stepping: Optimizer) -> None:
        """Record a step; of one with another inside, only that one."""
        before, self._before = self._before, None
        if before is None:
            return
        name = type(stepping).__name__
        self.writes[name] += before != self._versions()
        if self.writes.total() >= _TOO_MANY:
            self._overtaken(name)

    def _overtaken(self, name: str) -> None:
        """Drop the armed step and warn: another optimizer takes the steps."""
        self._drop()
        own = type(self._own).__name__
        self._failures.warn(
            "overtaken",
            f"adiv_monitor: another optimizer ({name}) than the monitor's ({own}) trains the "
            "parameters. Nothing is measured until the monitor's optimizer steps again; create a "
            "new Monitor for the new optimizer",
        )

    def _versions(self) -> list[int]:
        return [*map(version, self._parameters)]


def _nothing() -> None: ...


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
