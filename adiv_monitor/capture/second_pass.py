"""A forward pass that is no training step, of which the uses of parameters are taken."""

import numpy as np
from torch import nn

from adiv_monitor.capture.context import Context
from adiv_monitor.capture.forwards import Forwards
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.layer_rows import Chooser
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.names import Names
from adiv_monitor.capture.selection import Selection
from adiv_monitor.capture.takes import Takes
from adiv_monitor.capture.watching import Watching
from adiv_monitor.capture.weights.pieces import Pieces
from adiv_monitor.capture.weights.provenance import Provenance
from adiv_monitor.capture.whole_modules.without_rule import ParametersWithoutRule


class SecondPass(Takes):
    """Context in which it takes the uses of parameters; exceptions are raised.

    Args:
        model: the model, as it runs in the context.
        selection: the parameters.
        pieces: the pieces of parameters that are known already.
        watching: the class that finds uses.

    Attributes:
        layers: the layers.
        watching: what finds the uses.
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        pieces: Pieces | None = None,
        watching: type[Watching] = Watching,
    ) -> None:
        guard = Guard()  # no training step runs that could be disturbed
        self._provenance = Provenance(model, selection.parameters, pieces)
        self._forwards = Forwards(selection, guard, repeated=True)
        names = Names(model, selection, self._forwards)
        chooser = Chooser(None, np.random.default_rng(0))
        self.layers = Layers(names, self._provenance, chooser, Context(guard))
        self._without_rule = ParametersWithoutRule(selection)
        given = selection, self._forwards, self.layers, self._without_rule, self
        self.watching = watching(*given, repeated=True)

    def __enter__(self) -> None:
        self._provenance.start()  # with the buffers of this run
        self._forwards.watch(self.watching)

    def __exit__(self, *error: object) -> None:
        call_all(self.watching.detach, self._without_rule.release, self._forwards.remove)
