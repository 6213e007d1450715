"""The layers found in one step, with their rows."""

from collections.abc import Iterable

from torch import Tensor, nn

from adiv_monitor.capture.context import Context
from adiv_monitor.capture.layer_rows import Chooser, LayerRows
from adiv_monitor.capture.names import Names
from adiv_monitor.capture.selection import Layer
from adiv_monitor.capture.weights.pieces import Source
from adiv_monitor.capture.weights.provenance import Provenance
from adiv_monitor.features.uses import Use, shape_alike


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
        modes: whether the model was in training mode, of all uses.
    """

    def __init__(
        self, names: Names, provenance: Provenance, chooser: Chooser, context: Context
    ) -> None:
        self.found: dict[str, Layer] = {}
        self.rows: dict[str, LayerRows] = {}
        self.modes = set[bool]()
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
        if self.names.root.training not in self.modes:
            self.modes.add(self.names.root.training)
        if isinstance(known, Layer):
            found = self.found.get(known.path)
            if found is None or found is known:
                return found or self._register(known)
            known = known.path
        weight, bias = self.provenance.source(use.weight), self.provenance.source(use.bias)
        lead = weight or bias
        if lead is None:
            return None
        names = self.names.of(use, lead) if known is None else [known]
        return self._find(names, use, weight, bias)

    def of_whole(self, use: Use, module: nn.Module, parameters: list[nn.Parameter]) -> Layer | None:
        """Return the layer that stands for a module as a whole with respect to these parameters."""
        pieces = [self.provenance.pieces.of(p) for p in parameters]
        names = self.names.of_whole(module, parameters)
        return self._find(names, use, Source(pieces, through=module), None)

    def _find(
        self, names: Iterable[str], use: Use, weight: Source | None, bias: Source | None
    ) -> Layer | None:
        """Return the first named layer with the same form and sources, or create a new one."""
        made = use.kind, use.form, weight and weight.identity, bias and bias.identity
        for path in names:
            known = self.found.get(path)
            if known is None:
                return self._new(path, use, weight, bias)
            if made == known.identity and shape_alike(known.shaped, use.shaped, use.weight):
                return known
        raise ValueError("its rule finds other parameters at every call")

    def _new(self, path: str, use: Use, weight: Source | None, bias: Source | None) -> Layer | None:
        if any(tensor is not None and not tensor.numel() for tensor in (use.weight, use.bias)):
            return None  # a weight that was repeated for the samples of an empty batch
        lead = weight or bias
        assert lead is not None
        place = self.names.place(id(lead.pieces[0].parameter))
        module = lead.through if lead.pieces[1:] else None
        owner = module or self.names.owner(place)
        how = use.shaped, place.position, use.form
        return self._register(Layer(path, owner, use.kind, weight, bias, *how))

    def _register(self, layer: Layer) -> Layer:
        """Register a layer that was found, and watch it if it is due."""
        self.found[layer.path] = layer
        due, first = self.names.selection.due, layer.parameters[0]
        if layer.path not in self.context.switched_off and (due is None or id(first) in due):
            self.rows[layer.path] = LayerRows(layer, self._chooser)
        return layer

    def of_parts(self, parameter: Tensor) -> list[str]:
        """Return the paths of the layers that a parameter, or a part of it, belongs to."""
        layers = self.found.items()
        return [path for path, x in layers if any(p is parameter for p in x.parameters)]

    # --- layers that are not watched -------------------------------------------------------------

    def failed(self, path: str, error: Exception) -> None:
        """Stop watching a layer whose hook raised an exception."""
        self.rows.pop(path, None)
        self.context.fail(path, error)
