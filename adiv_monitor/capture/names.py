"""Names of layers in reports, based on the modules that hold their parameters."""

from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import count

from torch import nn

from adiv_monitor.capture.forwards import Forwards
from adiv_monitor.capture.selection import Place, Selection, inside_wrappers
from adiv_monitor.capture.weights.pieces import Source
from adiv_monitor.features.functions.linear import part_of
from adiv_monitor.features.uses import Use

# The prefixes that torch puts before a module's class name when it creates a class from it.
_MADE = ("FSDP", "Parametrized", "Replicate", "DDP")


@cache
def _name_of(kind: type) -> str:
    made = {f"{prefix}{base.__name__}": base for base in kind.__bases__ for prefix in _MADE}
    return _name_of(made[kind.__name__]) if kind.__name__ in made else kind.__name__


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class without torch's prefix: "Linear" for an `FSDPLinear`."""
    kind: type = type(module)
    return _name_of(kind)


class Names:
    """Names for layers, best first; the later ones serve if the earlier ones are in use.

    Args:
        model: the model.
        selection: the parameters to measure.
        forwards: the running forward calls.

    Attributes:
        root: the model, inside its wrappers.
        selection: the parameters to measure.
    """

    def __init__(self, model: nn.Module, selection: Selection, forwards: Forwards) -> None:
        self.root = inside_wrappers(model)
        self.selection = selection
        self._forwards = forwards

    def first(self, parameters: Collection[int]) -> Place:
        """Return the place of the parameter that comes first in the model."""
        places = self.selection.places
        return self.place(min(parameters, key=lambda p: places[p][0].position))

    def place(self, parameter: int) -> Place:
        """Return the place of a parameter, preferably in the running module."""
        places = self.selection.places[parameter]
        running = self._forwards.innermost
        return next((place for place in places if place.module is running), places[0])

    def owner(self, place: Place) -> nn.Module:
        """Return the module that held the parameter before torch moved it; see `Place.home`."""
        path, _ = place.home
        if path == place.path:
            return place.module
        modules = self.selection.modules
        return next((m for m, its in modules.items() if its == path), place.module)

    def of(self, use: Use, lead: Source) -> Iterator[str]:
        """Yield names for a layer: of its module, of its parameter, and with its user."""
        place = self.first([id(piece.parameter) for piece in lead.pieces])
        path, name = place.home
        rows = lead.pieces[0].name if len(lead.pieces) == 1 else ""
        part = use.part or part_of(place.module, place.name)
        full = ".".join(filter(None, (path, part or name))) + ("" if part else rows)
        if part == "" and name in ("weight", "bias") and not rows:
            yield path
        yield full
        yield from self._with_user(full, use.kind)

    def of_whole(self, module: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[str]:
        """Yield names for a module measured as a whole: its path, or that of its one parameter.

        The model itself is named after its class.
        """
        name = self.selection.modules[module] or type(self.root).__name__
        if len(parameters) == 1:
            place = self.place(id(parameters[0]))
            is_whole = place.path and place.name in ("weight", "bias")
            name = place.path if is_whole else place.full_name
        yield from (name, f"{name}@module")
        yield from self._with_user(name, "module")

    def _with_user(self, name: str, kind: str) -> Iterator[str]:
        user = self.selection.modules[self._forwards.innermost] or kind
        yield f"{name}@{user}"
        yield from (f"{name}@{user}#{i}" for i in count(2))
