"""The layers found in one step, with their calls and rows."""

from collections import defaultdict
from collections.abc import Collection, Container, Iterable
from operator import attrgetter

from torch import Tensor, nn

from adiv_monitor.capture.context import Context
from adiv_monitor.capture.layer_rows import Chooser, LayerRows
from adiv_monitor.capture.names import Names
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.weights.pieces import Piece, Source, overlap, together
from adiv_monitor.capture.weights.provenance import Provenance
from adiv_monitor.features.features import Features
from adiv_monitor.features.rows import Rows
from adiv_monitor.features.uses import Refused, Use, shape_alike

_CHANGES = (
    "its weight is computed from parameters anew at every call, from other constants or random "
    "numbers: only calls with the same weight are measured together"
)


class Layers:
    """Finds the layer that a use belongs to, or creates it.

    Args:
        names: the names of layers.
        provenance: the provenance of tensors.
        chooser: chooses rows.
        context: the run around the step.

    Attributes:
        found: the layers found so far, by path.
        rows: the rows of the watched layers, by path: those that are due in this step.
    """

    def __init__(
        self, names: Names, provenance: Provenance, chooser: Chooser, context: Context
    ) -> None:
        self.found: dict[str, Layer] = {}
        self.rows: dict[str, LayerRows] = {}
        self.names = names
        self.provenance = provenance
        self.context = context
        self._chooser = chooser

    # --- finding ---------------------------------------------------------------------------------

    def of(self, use: Use, known: Layer | str | None = None) -> Layer | None:
        """Return the layer that a use belongs to; None if none of its parameters is measured.

        Args:
            use: the use.
            known: the layer or its path, if already known.
        """
        if isinstance(known, Layer):
            found = self.found.get(known.path)
            if found is None:
                return self._register(known)
            if found is known:
                return known
            known = known.path
        weight, bias = self.provenance.source(use.weight), self.provenance.source(use.bias)
        lead = weight or bias
        if lead is None:
            return None
        names = self.names.of(use, lead) if known is None else [known]
        return self._find(names, use, weight, bias)

    def of_whole(self, module: nn.Module, parameters: list[nn.Parameter]) -> Layer | None:
        """Return the layer that stands for a module as a whole with respect to these parameters."""
        source = together([self.provenance.pieces.of(p) for p in parameters], module)
        use = Use("module", None, None, _no_features)
        return self._find(self.names.of_whole(module, parameters), use, source, None)

    def _find(
        self, names: Iterable[str], use: Use, weight: Source | None, bias: Source | None
    ) -> Layer | None:
        """Return the first named layer with the same form and sources, or create a new one."""
        path = ""
        for path in names:
            known = self.found.get(path)
            if known is None:
                return self._new(path, use, weight, bias)
            made = known.kind, known.form, _identity(known.weight, known.bias)
            alike = made == (use.kind, use.form, _identity(weight, bias))
            if alike and shape_alike(known.shaped, use.shaped, use.weight):
                if known.is_made_of(weight, bias):
                    return known
                self.rows.pop(path, None)
                raise Refused(_CHANGES)
        raise ValueError(f"'{path}' uses other parameters at every call")

    def _new(self, path: str, use: Use, weight: Source | None, bias: Source | None) -> Layer | None:
        if any(tensor is not None and not tensor.numel() for tensor in (use.weight, use.bias)):
            return None  # a weight that was repeated for the samples of an empty batch
        lead = weight or bias
        assert lead is not None
        parameter = lead.pieces[0].parameter
        place = self.names.place(id(parameter))
        order, module = self.names.position[place.full_name], self.names.owner(place)
        if lead.through is not None and len(lead.pieces) > 1:
            module = lead.through
        return self._register(
            Layer(path, module, use.kind, weight, bias, use.shaped, order, use.form)
        )

    def _register(self, layer: Layer) -> Layer:
        """Register a layer that was found, and watch it if it is due."""
        path = layer.path
        self.found[path] = layer
        if path not in self.context.switched_off and self.names.selection.is_due(layer):
            self.rows[path] = LayerRows(layer, self._chooser)
        return layer

    def forget(self, path: str) -> None:
        """Remove a layer that turned out not to exist."""
        del self.found[path]
        self.rows.pop(path, None)

    # --- layers that are not watched -------------------------------------------------------------

    @property
    def any_off(self) -> bool:
        """Whether any layer must not be watched."""
        return bool(self.context.switched_off)

    def is_off(self, path: str) -> bool:
        """Return whether the layer or parameter at this path must not be watched."""
        return path in self.context.switched_off

    def failed(self, path: str, error: Exception) -> None:
        """Stop watching a layer whose hook raised an exception."""
        self.rows.pop(path, None)
        self.context.fail(path, error)

    # --- results ---------------------------------------------------------------------------------

    def in_order(self) -> list[Layer]:
        """Return the layers that were seen, in the model's order."""
        return sorted(self.found.values(), key=attrgetter("place"))

    def of_parts(self, parameter: Tensor) -> list[str]:
        """Return the paths of the layers that a parameter, or a part of it, belongs to."""
        layers = self.found.items()
        return [path for path, x in layers if any(p is parameter for p in x.parameters)]

    def shared(self, reached: Container[Layer], elsewhere: Collection[int]) -> set[str]:
        """Return the paths of the layers that share at least one parameter entry with another use.

        Args:
            reached: the layers that a gradient reached; other uses do not count.
            elsewhere: ids of the parameters that have a use outside of all layers.
        """
        uses: dict[int, list[tuple[Layer, Piece]]] = defaultdict(list)
        for layer in self.found.values():
            if layer in reached:
                for piece in layer.pieces:
                    uses[id(piece.parameter)] += ((layer, piece),)
        found = set()
        for key, users in uses.items():
            is_elsewhere = key in elsewhere
            if is_elsewhere or users[1:]:
                pieces = [piece for _, piece in users]
                if is_elsewhere or overlap(pieces[0].parameter, pieces):
                    found |= {layer.path for layer, _ in users}
        return found


def _no_features(rows: Rows) -> Features:
    raise NotImplementedError("the effect of a module as a whole on its rows is known from a rerun")


def _identity(weight: Source | None, bias: Source | None) -> tuple[object, ...]:
    return weight and weight.identity, bias and bias.identity
