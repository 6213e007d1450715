"""What measured steps showed about a run, which later steps rely on."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ref

from torch import Tensor

from adiv_monitor.step.earlier_weights import EarlierWeights
from adiv_monitor.step.flat import Flat


class Untrained(NamedTuple):
    """A parameter that the optimizer does not step: it does not hold it, or it has no gradient.

    Attributes:
        parameter: the parameter.
        version: its version as the step began.
        norm: norm of some of its entries then.
    """

    parameter: ref[Tensor]
    version: int
    norm: float


@dataclass
class RunHistory:
    """The run history; until the first measured step, everything is considered possible.

    Attributes:
        gradient_changes: whether the optimizer changes `.grad` in its step, so γ must be copied.
        weights_change: whether the weights change after the step, so a differs from u.
        learnt: whether a first step was measured.
        suspected: layers whose gradient seemed to exceed GᵀΦ of their rows at the last step.
        distrusted: layers whose gradient was once not that of their rows times a known factor.
        seen: layers that were measured, or found to be unmeasurable.
        flats: on a CPU, the copies of the last step, whose memory the next step uses again: each
            page of new memory costs a fault, more than the copy itself.
        cut_off: ids of the parameters that were cut off from the loss when that was last known.
        weights: some weights of earlier steps.
        untrained: by id, the parameters that the optimizer did not step in the last step.
    """

    gradient_changes: bool = True
    weights_change: bool = True
    learnt: bool = False
    suspected: set[str] = field(default_factory=set)
    distrusted: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    flats: list[Flat] = field(default_factory=list)
    cut_off: set[int] = field(default_factory=set)
    weights: EarlierWeights = field(default_factory=EarlierWeights)
    untrained: dict[int, Untrained] = field(default_factory=dict)

    def learn(self, *, gradient_changed: bool, weights_changed: bool) -> None:
        """Record the changes seen; each is expected from then on, even if seen only once."""
        if not self.learnt:
            self.gradient_changes = self.weights_change = False
            self.learnt = True
        self.gradient_changes |= gradient_changed
        self.weights_change |= weights_changed

    def knows(self, paths: Collection[str]) -> bool:
        """Return whether all these layers were seen before; a new one may do anything."""
        return self.seen.issuperset(paths)
