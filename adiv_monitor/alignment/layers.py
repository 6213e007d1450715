"""The layers of a model as the probe's forward pass shows them: which feeds which, and their roles.

Roles: an embedding is fed by none, a readout feeds none, hidden layers lie in between. Excluded are
those with so few inputs that a logarithm to that base says nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch import nn

from adiv_monitor.alignment.slots import Slot, makers_of

Role = Literal["embedding", "hidden", "readout", "excluded"]
ROLES: tuple[Role, ...] = get_args(Role)
LEAST_FAN_IN = 16


@dataclass(frozen=True, eq=False)
class AlignedLayer:
    """A layer that is measured.

    Attributes:
        path: what reports call it.
        slot: where its weight lies.
        module: that holds the weight.
        name: of the weight there.
        predecessors: paths of the layers whose outputs make up its input.
        role: what it is to the solver.
    """

    path: str
    slot: Slot
    module: nn.Module
    name: str
    predecessors: tuple[str, ...]
    role: Role = "hidden"

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that learn and that the weight is, or is made of."""
        return [p for p in makers_of(self.module, self.name) if p.requires_grad]

    @property
    def width(self) -> int:
        """Of which its learning rate is a power: fan-in, of an embedding its fan-out."""
        return self.slot.fan_out if self.role == "embedding" else self.slot.fan_in


def with_roles(
    layers: Sequence[AlignedLayer], chosen: Mapping[str, Role]
) -> tuple[AlignedLayer, ...]:
    """The layers, each with the role of the first pattern that fits its path, else the inferred.

    Raises:
        ValueError: a pattern fits none, or there is no such role, or a layer can't have it.
    """
    if wrong := [role for role in chosen.values() if role not in ROLES]:
        raise ValueError(f"Probe(roles=…): got {wrong[0]!r}, expected one of {', '.join(ROLES)}")
    paths = [layer.path for layer in layers]
    if idle := [p for p in chosen if not any(fnmatchcase(path, p) for path in paths)]:
        raise ValueError(
            f"Probe(roles=…): {idle[0]!r} fits no layer, expected patterns over {', '.join(paths)}"
        )
    before = {layer.path: layer.predecessors for layer in layers}
    given = {
        path: next((role for p, role in chosen.items() if fnmatchcase(path, p)), None)
        for path in paths
    }
    for path, role in given.items():
        if role == "embedding":
            before[path] = ()
        elif role == "readout":  # what it feeds is fed by what feeds it
            for other, sources in before.items():
                if path in sources:
                    bypass = [p for s in sources for p in (before[path] if s == path else (s,))]
                    before[other] = tuple(dict.fromkeys(bypass))
    feeding = {path for sources in before.values() for path in sources}
    return tuple(
        replace(
            layer,
            predecessors=before[layer.path],
            role=_role(layer, bool(before[layer.path]), layer.path in feeding, given[layer.path]),
        )
        for layer in layers
    )


def _role(layer: AlignedLayer, fed: bool, feeds: bool, given: Role | None) -> Role:
    inferred: Role = "embedding" if not fed else "hidden" if feeds else "readout"
    alone = not fed and not feeds
    if alone or (fed and layer.slot.fan_in < LEAST_FAN_IN):
        inferred = "excluded"
    if given == "hidden" and not (fed and feeds):
        raise ValueError(
            f"Probe(roles=…): '{layer.path}' can't be hidden, because it "
            f"{'feeds' if fed else 'is fed by'} no other layer"
        )
    if given == "readout" and not fed:
        raise ValueError(f"Probe(roles=…): '{layer.path}' can't be a readout: no layer feeds it")
    return given or inferred
