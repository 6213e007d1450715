"""The layers of a model in the probe's forward pass, their predecessors and their roles.

An embedding has no predecessor, a readout has no successor, and hidden layers lie in between.
Layers with so few inputs that a logarithm to that base is meaningless are excluded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch import Tensor, nn

Role = Literal["embedding", "hidden", "readout", "excluded"]
ROLES: tuple[Role, ...] = get_args(Role)
LEAST_FAN_IN = 16


@dataclass(frozen=True, eq=False)
class AlignedLayer:
    """A measured layer: one use of a weight.

    Attributes:
        path: name of the layer in reports.
        kind: how the weight is used: "linear", "convolution", "embedding", "table" (one that is
            indexed or added), "experts", or the kind of a registered rule for its module's class.
        fan_in: number of inputs of an output; of an embedding or a table, number of rows.
        fan_out: number of outputs; of an embedding or a table, its width.
        module: the module that holds the weight.
        name: name of the weight in the module.
        weights: the parameter that is the weight, or those that a parametrization of torch's takes.
        predecessors: paths of the layers whose outputs make up its input.
        entrywise: parameters that are added to, or scale, values computed from its output, entry by
            entry, such as its bias and the next norm's gain.
        is_table: whether rows of the weight are looked up instead of multiplied.
        groups: number of matrices in the weight: groups of a convolution, heads or experts.
        role: the layer's role for the solver.
    """

    path: str
    kind: str
    fan_in: int
    fan_out: int
    module: nn.Module
    name: str
    weights: tuple[nn.Parameter, ...]
    predecessors: tuple[str, ...]
    entrywise: tuple[nn.Parameter, ...] = ()
    is_table: bool = False
    groups: int = 1
    role: Role = "hidden"

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained ones among `weights`."""
        return [p for p in self.weights if p.requires_grad]

    @property
    def width(self) -> int:
        """The width whose power is the learning rate: fan-in, or fan-out of an embedding."""
        return self.fan_out if self.role == "embedding" else self.fan_in


def is_matrix(parameter: Tensor) -> bool:
    """Whether a parameter has more than one dimension of a size other than 1."""
    return sum(size != 1 for size in parameter.shape) > 1


def with_roles(
    layers: Sequence[AlignedLayer], chosen: Mapping[str, Role]
) -> tuple[AlignedLayer, ...]:
    """Return the layers with the role of the first pattern that fits, or the inferred role.

    Raises:
        ValueError: a pattern fits no layer, a role does not exist, or a layer can't have it.
    """
    if wrong := [role for role in chosen.values() if role not in ROLES]:
        raise ValueError(f"Probe(roles=…): got {wrong[0]!r}, expected one of {', '.join(ROLES)}")
    paths = [layer.path for layer in layers]
    if idle := [p for p in chosen if not any(fnmatchcase(path, p) for path in paths)]:
        raise ValueError(
            f"Probe(roles=…): {idle[0]!r} fits no layer, expected patterns over {', '.join(paths)}"
        )
    given = {
        path: next((role for p, role in chosen.items() if fnmatchcase(path, p)), None)
        for path in paths
    }
    kept = [replace(x, predecessors=()) if given[x.path] == "embedding" else x for x in layers]
    feeding = {path for layer in kept for path in layer.predecessors}
    return tuple(replace(x, role=_role(x, x.path in feeding, given[x.path])) for x in kept)


def _role(layer: AlignedLayer, feeds: bool, given: Role | None) -> Role:
    fed = bool(layer.predecessors)
    inferred: Role = "embedding" if not fed else "hidden" if feeds else "readout"
    if (fed and layer.fan_in < LEAST_FAN_IN) or not (fed or feeds):
        inferred = "excluded"
    if (given == "hidden" and not (fed and feeds)) or (given == "readout" and (feeds or not fed)):
        raise ValueError(
            f"Probe(roles=…): '{layer.path}' can't be {given}, because it "
            f"{'feeds' if feeds else 'does not feed'} and {'is' if fed else 'is not'} fed by others"
        )
    return given or inferred
