"""The layers found in one step, with their names in reports and their rows."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import chain, count

from torch import Tensor, nn

from adiv_monitor.capture.context import Context
from adiv_monitor.capture.forwards import Forwards
from adiv_monitor.capture.layer_rows import LayerRows
from adiv_monitor.capture.selection import Layer, Place, Selection, inside_wrappers
from adiv_monitor.capture.weights.pieces import Piece, Source
from adiv_monitor.capture.weights.provenance import Provenance
from adiv_monitor.features.functions.linear import part_of
from adiv_monitor.features.uses import Use


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class without torch's prefix: "Linear" for an `FSDPLinear`."""
    return type(module).__name__.removeprefix("FSDP").removeprefix("Parametrized")


class Layers:
    """Finds the layer that a use belongs to, or creates it.

    Args:
        model: the model.
        selection: the parameters to measure.
        context: the run around the step.
        follows_all: see `Provenance`.

    Attributes:
        found: the layers found so far, by path.
        rows: the rows of the watched layers, by path: those that are due in this step.
        forwards: the running forward calls.
        provenance: the provenance of tensors.
        modes: whether the model was in training mode, of all uses.
    """

    def __init__(
        self, model: nn.Module, selection: Selection, context: Context, *, follows_all: bool = True
    ) -> None:
        self.found: dict[str, Layer] = {}
        self.rows: dict[str, LayerRows] = {}
        self.modes = set[bool]()
        self.selection, self.context, self.forwards = selection, context, Forwards()
        self.provenance = Provenance(model, selection.parameters, follows_all=follows_all)
        self._root = inside_wrappers(model)

    # --- finding ---------------------------------------------------------------------------------

    def of(self, use: Use, known: Layer | str | None = None) -> Layer | None:
        """Return the layer that a use belongs to; None if none of its parameters is measured.

        Args:
            use: the use.
            known: the layer or its path, if already known.
        """
        if self._root.training not in self.modes:
            self.modes.add(self._root.training)
        if isinstance(known, Layer):
            found = self.found.get(known.path)
            if found is None or found is known:
                return found or self._register(known)
            known = known.path
        weight, bias = self.provenance.source(use.weight), self.provenance.source(use.bias)
        lead = weight or bias
        if lead is None:
            return None
        names = self._names(use, lead) if known is None else [known]
        return self._find(names, use, weight, bias)

    def of_whole(self, use: Use, module: nn.Module, parameters: list[nn.Parameter]) -> Layer | None:
        """Return the layer that stands for a module as a whole with respect to these parameters.

        It is named by its module's path, or as its one parameter is; the model itself after its
        class.
        """
        source = Source([*map(Piece, parameters)], through=module)
        name = self.selection.modules[module] or type(self._root).__name__
        several = chain([name, f"{name}@module"], self._with_user(name, "module"))
        names = several if len(parameters) > 1 else self._names(use, source)
        return self._find(names, use, source, None)

    def _find(
        self, names: Iterable[str], use: Use, weight: Source | None, bias: Source | None
    ) -> Layer | None:
        """Return the first named layer with the same form and sources, or a new one."""
        if any(tensor is not None and not tensor.numel() for tensor in (use.weight, use.bias)):
            return None  # a weight that was repeated for the samples of an empty batch
        lead = weight or bias
        assert lead is not None
        place = self.place(id(lead.pieces[0].parameter))
        of_use = use.shaped, place.position, use.form
        made = Layer("", lead.through or self._owner(place), use.kind, weight, bias, *of_use)
        for path in names:
            known = self.found.get(path)
            if known is None:
                return self._register(replace(made, path=path))
            if made.identity == known.identity:
                return known
        raise ValueError("its rule finds other parameters at every call")

    def _register(self, layer: Layer) -> Layer:
        """Register a layer that was found, and watch it if it is due."""
        self.found[layer.path] = layer
        if layer.path not in self.context.switched_off and self.selection.is_due(layer):
            self.rows[layer.path] = LayerRows(layer, self.context.chooser)
        return layer

    # --- places and names ------------------------------------------------------------------------

    def first(self, parameters: Collection[int]) -> Place:
        """Return the place of the parameter that comes first in the model."""
        places = self.selection.places
        return self.place(min(parameters, key=lambda p: places[p][0].position))

    def place(self, parameter: int) -> Place:
        """Return the place of a parameter, preferably in the running module."""
        places = self.selection.places[parameter]
        running = self.forwards.innermost
        return next((place for place in places if place.module is running), places[0])

    def _owner(self, place: Place) -> nn.Module:
        """Return the module that held the parameter before torch moved it; see `Place.home`."""
        path, modules = place.home[0], self.selection.modules
        if path == place.path:
            return place.module
        return next((module for module, its in modules.items() if its == path), place.module)

    def _names(self, use: Use, lead: Source) -> Iterable[str]:
        """Return names for a layer: of its module, of its parameter, and with its user."""
        place = self.first([id(piece.parameter) for piece in lead.pieces])
        path, name = place.home
        rows = lead.pieces[0].name if len(lead.pieces) == 1 else ""
        part = use.part or part_of(place.module, place.name)
        full = ".".join(filter(None, (path, part or name))) + ("" if part else rows)
        of_module = [path] if part == "" and name in ("weight", "bias") and not rows else []
        return chain(of_module, [full], self._with_user(full, use.kind))

    def _with_user(self, name: str, kind: str) -> Iterable[str]:
        """Return names with the running module's, which serve if better ones are in use."""
        user = f"{name}@{self.selection.modules[self.forwards.innermost] or kind}"
        return chain([user], (f"{user}#{i}" for i in count(2)))

    def of_parts(self, parameter: Tensor) -> list[str]:
        """Return the paths of the layers that a parameter, or a part of it, belongs to."""
        layers = self.found.items()
        return [path for path, x in layers if any(p is parameter for p in x.parameters)]

    # --- layers that are not watched -------------------------------------------------------------

    def failed(self, path: str, error: Exception) -> None:
        """Stop watching a layer whose hook raised an exception."""
        self.rows.pop(path, None)
        self.context.fail(path, error)
