"""What a watched forward pass hands its uses to."""

from typing import Protocol

from torch import Tensor

from adiv_monitor.capture.layer_rows import Call
from adiv_monitor.capture.selection import Layer
from adiv_monitor.features.recurrent import RecurrentCall
from adiv_monitor.features.uses import Use


class Takes(Protocol):
    """Receives the uses that are seen in a forward pass."""

    def use(self, use: Use, output: Tensor, known: Layer | str | None = None) -> Call | None:
        """Take a use and the function's result; return the call if the layer is watched.

        Args:
            use: the use.
            output: the result of the function, or of a module that is measured as a whole.
            known: the layer, if it is known already; or the path of a module whose class has a
                rule, which may not describe the output.
        """
        ...

    def maps(self, made: RecurrentCall, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Take a recurrent call and return the weights that its uses account for; see `use`."""
        ...
