"""What the capture of a step knows of the run, and whom it calls."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from adiv_monitor.capture.check import Check
from adiv_monitor.capture.guard import Guard, raised
from adiv_monitor.capture.layer_rows import Chooser
from adiv_monitor.capture.passes import Passes
from adiv_monitor.features.uses import unknown


@dataclass(frozen=True)
class Context:
    """The run around a captured step.

    Attributes:
        guard: receives failures that belong to no layer; nothing is watched after the first one.
        chooser: chooses rows.
        fail: called with a layer's path and the exception that its hook raised; the layer is not
            watched from then on.
        switched_off: paths of the layers that are not watched because one of their hooks raised;
            `fail` adds to them.
        checked: paths of the layers whose module's rule was already checked against the output.
        begins: called when the first module with parameters has run with gradients.
        passes: follows the backward passes.
        check: checks gradients; None: this step has no check.
    """

    guard: Guard
    chooser: Chooser
    fail: Callable[[str, Exception], None] = raised
    switched_off: Collection[str] = ()
    checked: Collection[str] = ()
    begins: Callable[[], object] = unknown
    passes: Passes = field(default_factory=Passes)
    check: Check | None = None
