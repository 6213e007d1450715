"""What the capture of a step knows of the run, and whom it calls."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from adiv_monitor.capture.guard import Guard
from adiv_monitor.capture.passes import Passes
from adiv_monitor.maths.alike import raised


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Context:
    """The run around a captured step.

    Attributes:
        guard: receives failures that belong to no layer; nothing is watched after the first one.
        fail: called with a layer's path and the exception that its hook raised; the layer is not
            watched from then on.
        switched_off: paths of the layers that are not watched because one of their hooks raised;
            `fail` adds to them.
        checked: paths of the layers whose module's rule was already checked against the output.
        begins: called when the first layer's forward pass with gradients begins.
        passes: follows the backward passes.
        attainable: whether to gather all rows as well, for the ceiling.
    """

    guard: Guard
    fail: Callable[[str, Exception], None] = raised
    switched_off: Collection[str] = ()
    checked: Collection[str] = ()
    begins: Callable[[], object] = _nothing
    passes: Passes = field(default_factory=Passes)
    attainable: bool = False
