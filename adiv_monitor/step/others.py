"""Steps of other optimizers than the monitor's that move measured parameters."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer, optimizer

from adiv_monitor.capture.hook import Hook, take_off
from adiv_monitor.rerun.surroundings import version


class Others:
    """Counter of the steps of other optimizers that have written to parameters.

    Args:
        own: the monitor's optimizer, whose steps are not counted.
        parameters: the parameters whose versions are compared before and after a step.
        counts: returns whether a step that ends now is to be counted; None: it is a part of the
            monitored optimizer's own step.
        guard: runs the body of a hook: (body, *arguments).

    Attributes:
        begun: number of all steps, of any optimizer, that have begun.
        steps: number of these steps.
        last: class name of the optimizer that took the last of them.
        names: class names of all that stepped, whatever they wrote to.
        writers: class names of those that wrote to the parameters.
    """

    def __init__(
        self,
        own: Optimizer | None,
        parameters: Sequence[Tensor],
        counts: Callable[[], bool | None],
        guard: Callable[..., object],
    ) -> None:
        self.begun = self.steps = 0
        self.last = ""
        self.names: dict[str, None] = {}
        self.writers: dict[str, None] = {}
        self.guard = guard
        self._own = own
        self._parameters = parameters
        self._counts = counts
        self._before: list[int] | None = None

    def follow(self) -> None:
        """Start counting; call `leave` afterwards, even if this raises."""
        _followers.add(weakref.ref(self, _leave))
        _settle()

    def leave(self) -> None:
        """Stop counting; after an interrupt, it can be called again."""
        _leave(weakref.ref(self))

    def begins(self, stepping: Optimizer) -> None:
        """Record the parameters' versions as an optimizer's step begins."""
        self.begun += 1
        if stepping is not self._own:
            self._before = self._versions()

    def ends(self, stepping: Optimizer) -> None:
        """Count an optimizer's step as it ends; a step with another inside counts only that one."""
        before, self._before = self._before, None
        if stepping is self._own or before is None or (counts := self._counts()) is None:
            return
        name = type(stepping).__name__
        self.names[name] = None
        if before != self._versions():
            self.writers[name] = None
            if counts:
                self.steps += 1
                self.last = name

    def _versions(self) -> list[int]:
        return [*map(version, self._parameters)]


# Torch keeps global optimizer hooks forever: these hold weak references, and the last follower
# removes them.
_followers: set[weakref.ref[Others]] = set()


def _tell(body: Callable[[Others, Optimizer], None], stepping: Optimizer, *args: Any) -> None:
    """Call `body` for all followers; a global hook of optimizers, so failures are guarded."""
    for follower in [*_followers]:
        others = follower()
        if others is not None:
            others.guard(body, others, stepping)


_BEGINS, _ENDS = Hook(_tell, Others.begins), Hook(_tell, Others.ends)


def _leave(follower: weakref.ref[Others]) -> None:
    _followers.discard(follower)
    _settle()


def _settle() -> None:
    """Register the hooks if there are followers, and remove them if there are none."""
    for hook, table, put_on in (
        (_BEGINS, "_global_optimizer_pre_hooks", optimizer.register_optimizer_step_pre_hook),
        (_ENDS, "_global_optimizer_post_hooks", optimizer.register_optimizer_step_post_hook),
    ):
        hooks = getattr(optimizer, table)
        while bool(_followers) is not (hook in [*hooks.values()]):  # other threads may interfere
            if _followers:
                put_on(hook)
            else:
                take_off(optimizer, hook)
