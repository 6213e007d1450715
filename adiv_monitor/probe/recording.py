"""Records the calls of layers in a run of the probe: rows of their features and outputs."""

from collections import defaultdict
from zlib import crc32

import numpy as np
from torch import Tensor, nn

from adiv_monitor.capture.context import Context
from adiv_monitor.capture.forwards import Forwards
from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.layer_rows import Call, Chooser
from adiv_monitor.capture.layers import Layers
from adiv_monitor.capture.sampling import draw
from adiv_monitor.capture.selection import Layer, Selection
from adiv_monitor.capture.watch import Watch
from adiv_monitor.capture.watching import Watching
from adiv_monitor.capture.weights.provenance import Provenance
from adiv_monitor.features.uses import Refused, Use


class Recording:
    """Context in which the calls of layers are recorded; exceptions are raised.

    Which rows are chosen depends on the seed, the layer's path and the number of its call alone, so
    that another run has the same ones.

    Args:
        model: the model.
        selection: the parameters.
        max_rows: number of rows to choose in each call; None: all.
        seed: the seed.

    Attributes:
        follows_all: see `Provenance`.
        layers: the layers.
        watching: what finds the uses.
        calls: the calls by path of the layer, in the order of the first ones.
        uses: by path, the use of the layer's weights in its first call.
    """

    follows_all = True

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        max_rows: int | None,
        seed: int,
    ) -> None:
        guard = Guard()  # no training step runs that could be disturbed
        follows, chooser = self.follows_all, Chooser(None, np.random.default_rng(0))
        provenance = Provenance(model, selection.parameters, follows_all=follows)
        given = provenance, chooser, Context(guard)
        self.layers = Layers(model, selection, Forwards(), *given)
        self.watching = Watching(self.layers, self.use, self.maps)
        self._watch = Watch(self.watching, guard)
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.uses: dict[str, Use] = {}
        self._max_rows, self._seed = max_rows, seed

    def __enter__(self) -> None:
        self._watch.put_on()

    def __exit__(self, *error: object) -> None:
        call_all(self.watching.detach, self._watch.remove)

    def take(self, layer: Layer, use: Use, z: Tensor) -> Call:
        """Record a call of a layer whose output is z, (*rows, channels)."""
        key = self._seed, crc32(layer.path.encode()), len(self.calls.get(layer.path, ()))
        generator = np.random.default_rng(key)
        rows = draw(tuple(z.shape[:-1]), self._max_rows, np.inf, generator, z.device)
        call = Call(layer, rows)
        call.z = rows.take(z.detach())
        call.features = use.features(rows).restrict(**layer.trained)
        self.uses.setdefault(layer.path, use)
        self.calls[layer.path].append(call)
        return call

    def use(self, layer: Layer, use: Use, output: Tensor) -> None:
        """Take a use, and the result of its function or of a module as a whole."""
        raise NotImplementedError

    def maps(self, *_: object) -> list[Tensor]:
        """Refuse a recurrent call: unrolling it anew in every run is not worth it."""
        raise Refused("recurrent layers are not measured on a probe")
