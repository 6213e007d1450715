"""Steps of other optimizers than the monitor's while a step is armed."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, optimizer
from torch.utils.hooks import RemovableHandle

from adiv_monitor.rerun.surroundings import version


class Others:
    """Follows the steps of all optimizers, by torch's global hooks.

    Steps within the monitor's own optimizer's step, and after it, are a part of it.

    Args:
        own: the monitor's optimizer; None: it has none, and other steps are of no interest.
        parameters: the parameters whose versions are compared before and after a step.
        overtakes: called with the class name of an optimizer whose step has written to them.
        guard: runs the body of a hook: (body, *arguments).

    Attributes:
        begun: number of all steps, of any optimizer, that have begun.
        names: class names of the other optimizers that stepped, whatever they wrote to.
        writers: class names of those that wrote to the parameters.
    """

    def __init__(
        self,
        own: Optimizer | None,
        parameters: Sequence[Tensor],
        overtakes: Callable[[str], None],
        guard: Callable[..., object],
    ) -> None:
        self.begun = 0
        self.names: dict[str, None] = {}
        self.writers: dict[str, None] = {}
        self._own = own
        self._has_begun = own is None  # the monitor's optimizer
        self._parameters = parameters
        self._overtakes = overtakes
        self._guard = guard
        self._before: list[int] | None = None
        self._handles: list[RemovableHandle] = []

    def follow(self) -> None:
        """Put the hooks on; call `leave` afterwards, even if this raises."""
        me = weakref.ref(self)  # torch keeps the hooks, also of a monitor that nobody closes

        def guarded(body: Callable[["Others", Optimizer], None]) -> Callable[..., None]:
            def hook(stepping: Optimizer, *args: Any) -> None:
                if (others := me()) is not None:
                    others._guard(body, others, stepping)

            return hook

        handles = self._handles
        handles.append(optimizer.register_optimizer_step_pre_hook(guarded(Others._begins)))
        handles.append(optimizer.register_optimizer_step_post_hook(guarded(Others._ends)))
        weakref.finalize(self, _remove, handles)

    def leave(self) -> None:
        """Remove the hooks."""
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
        self.names[name] = None
        if before != self._versions():
            self.writers[name] = None
            self._overtakes(name)

    def _versions(self) -> list[int]:
        return [*map(version, self._parameters)]


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
