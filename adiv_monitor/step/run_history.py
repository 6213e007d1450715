"""What measured steps showed about a run, which later steps rely on."""

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from adiv_monitor.maths.sums import StepSums
from adiv_monitor.report import LayerReading
from adiv_monitor.step.gradient_check import tells

# In a run in which nothing changes, all gradients are checked at every so many measured steps.
_CHECKED_EVERY = 16


# Reasons that are no reason to check again.
_FORESEEN = ("", "shared", "weighed")


def _cheapest(sums: StepSums) -> str | None:
    """Return the path of the layer whose check costs least and tells a factor."""
    telling = [i for i in range(len(sums.paths)) if tells(sums, i)]
    features = np.array([about.features or 1 for about in sums.about])
    cost = sums.layers["total"] * features * np.maximum(sums.layers["groups"], 1)
    return sums.paths[min(telling, key=cost.__getitem__)] if telling else None


@dataclass
class RunHistory:
    """The run history. What was seen once is expected from then on.

    Attributes:
        changes: whether the optimizer changes `.grad` in its step, so that γ must be copied, or the
            weights change after the step, so that a differs from u.
        telling: at the coming measured step, only the gradient of this layer is checked: it tells
            the factor of all; None: all are checked.
        checked: measured steps since all gradients were checked.
        sound: layers whose gradient was that of their rows when all were last checked, at two
            measured steps in a row.
        readings: by layer, its last readings, each with its step.
        clipped: the number of steps whose gradient was clipped, and was not, as far as known.
        seen: layers that were measured, or found to be unmeasurable.
        checked_rules: layers whose module's rule was checked against the output.
        state: the state of the optimizer as the last measured step ended, see `state_of`.
    """

    changes: bool = False
    telling: str | None = None
    checked: int = 0
    sound: set[str] = field(default_factory=set)
    readings: dict[str, deque[tuple[int, LayerReading]]] = field(default_factory=dict)
    clipped: Counter[bool] = field(default_factory=Counter)
    seen: set[str] = field(default_factory=set)
    checked_rules: set[str] = field(default_factory=set)
    state: object = None

    def renews(self, began: object, ended: object) -> bool:
        """Return whether the optimizer's state was made in this step, or since the last one."""
        before, self.state = self.state, ended
        is_other = before is not None and before is not began
        return ended is not None and (began is None or is_other)

    def asks(self, *, surveys: bool) -> str | None:
        """Return `telling` of the coming step, in which all functions may be watched."""
        if surveys or self.checked >= _CHECKED_EVERY - 1:
            self.telling = None
        return self.telling

    def checks(self, sums: StepSums) -> None:
        """Learn from a check which gradients the next one is to check.

        Args:
            sums: the layers, in the units of the optimizer's gradient.
        """
        is_sound = bool(np.isin(sums.layers["reason"], _FORESEEN).all())
        is_whole = [sums.paths[i] for i in np.flatnonzero(sums.checked)] != [self.telling]
        is_sound &= len(set(sums.layers["factor"].tolist())) == 1
        was_sound, self.sound = self.sound, set(sums.paths) if is_sound else set()
        self.checked = 0 if is_whole else self.checked + 1
        if not self.sound or self.sound != was_sound:
            self.telling = None
        elif is_whole:
            self.telling = _cheapest(sums)
