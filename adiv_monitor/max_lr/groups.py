"""Parameter groups of an optimizer, with the learning rates of a parametrization."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, SupportsFloat, get_args

from torch import nn

from adiv_monitor.alignment.layers import AlignedLayer, is_matrix
from adiv_monitor.max_lr.base import Base, checked_layers
from adiv_monitor.max_lr.exponents import Parametrization
from adiv_monitor.max_lr.model import ModelNetwork, clipped, ratios_of
from adiv_monitor.max_lr.multiplier import multiplier_of
from adiv_monitor.max_lr.optimizers import AnyRule, UpdateRule, couples_decay, update_rule
from adiv_monitor.max_lr.solver import MaxLRSolution
from adiv_monitor.report import AlignmentReading

Kind = Literal["input", "hidden", "readout", "vector"]
_LAYER_KINDS: tuple[Kind, ...] = ("input", "hidden", "readout")
# Without a base: the width at which a vector learns as fast as hidden weights do. Under full
# alignment, multiplier × update of hidden weights is 1/n of η, the update of a vector of features.
_VECTOR_WIDTH = 64
Group = dict[str, Any]


def optimizer_groups(
    model: nn.Module,
    layers: Sequence[AlignedLayer],
    parametrization: str | Parametrization,
    optimizer: AnyRule,
    *,
    lr: float,
    base: Sequence[AlignedLayer] | None = None,
    alignments: Mapping[str, AlignmentReading] | None = None,
    eps: float | None = None,
    weight_decay: float | None = None,
    kinds: Mapping[Kind, float] | None = None,
    gains: Mapping[str, float] | None = None,
    rates: Mapping[str, float] | None = None,
) -> list[Group]:
    """Return parameter groups with the learning rate η (n/n₀)^(−c) for each layer.

    c is the solver's exponent, for full alignment unless measured `alignments` are given. n₀ is the
    layer's width in the base model, so at the base width every parameter has the learning rate η;
    without a base n₀ is 1. Where the number k of groups grows with
    the width instead of the fan-in, as in depthwise convolutions, the rate with SGD is (k/k₀)^G
    times as large. Parameters that act entry by entry, such as biases and norms ("vectors"), learn
    like an embedding without multiplier: at η
    with Adam, and at η (n/n₀)^G with SGD, where G is the exponent of the features' gradients.
    Vectors that act only on outputs of readouts learn at η. Without a base these rates are scaled
    so that a vector learns as fast as hidden weights at a width of 64. Excluded layers learn at
    their c too. A matrix that the probe's forward pass does not use has no width.

    Args:
        model: the model.
        layers: result of `parametrize_model`, or `Alignment(model, probe).layers`.
        parametrization: the model's parametrization; a `Parametrization` if the model's own code
            multiplies, instead of `parametrize_model`.
        optimizer: see `solve_max_lr`.
        lr: η.
        base: layers of the same model at the base width, see `parametrize_model`.
        alignments: result of `Alignment.read` after a training at the base width. Full alignment
            where a value is None, and in layers without a reading.
        eps: ε of Adam at the base width; at other widths it shrinks as gradients do, (n/n₀)^(−g).
            None: not in the groups.
        weight_decay: λ, for optimizers that multiply decay by the rate (AdamW, SGD). Each group's
            decay times its rate is η λ. None: not in the groups, so decay follows the rate.
        kinds: further factors of η by kind of parameter: "input", "hidden", "readout", "vector".
            The kind of a shared parameter is that of its first use.
        gains: further factors by layer, such as `MaxLRScheduler.proposed` of another run. That of
            a shared parameter is that of its first use.
        rates: learning rates by name of a parameter, whatever uses it.

    Returns:
        The groups, each with its "name", the "kind" of its parameters and the "rule" of the
        optimizer that they are for.

    Raises:
        ValueError: the exponents have no solution, matrices learn that no layer uses, layers, kinds
            or names are not the model's, the base is not that of the model's multipliers, or the
            optimizer's weight decay is part of the gradient.
    """
    rule = update_rule(optimizer)
    layers = checked_layers("optimizer_groups(layers=…)", layers)
    _check_number("lr", lr)
    for argument, decay in (("eps", eps), ("weight_decay", weight_decay)):
        _check_number(argument, decay or 1.0)  # None and 0 may be
    kinds, gains, rates = kinds or {}, gains or {}, rates or {}
    for argument, given in (("kinds", kinds), ("gains", gains), ("rates", rates)):
        for name, value in given.items():
            _check_number(f"{argument}[{name!r}]", value)
    parameters = dict(model.named_parameters())
    theirs = {id(p) for p in parameters.values()}
    if strange := [x.path for x in layers if not theirs.issuperset(map(id, x.parameters))]:
        raise ValueError(
            f"optimizer_groups(layers=…): {strange[0]!r} trains what {type(model).__name__} does "
            "not hold, expected layers of this very model"
        )
    _check_names("kinds", kinds, get_args(Kind))
    _check_names("rates", rates, parameters)
    _check_names("alignments", alignments or {}, [layer.path for layer in layers])
    if weight_decay is not None and couples_decay(optimizer):
        raise ValueError(
            "optimizer_groups(weight_decay=…): the decay of this optimizer is part of the gradient "
            "that it normalises, so no factor keeps its share at all widths: expected AdamW or SGD"
        )
    network = ModelNetwork.of(layers, parametrization, rule)
    solution = network.solve(clipped(ratios_of(alignments or {})))
    if solution.status != "optimal":
        raise ValueError(f"optimizer_groups: {solution.status}: {solution.message}")
    at_base = Base.of(layers, base)
    _check_ratios(layers, at_base)
    groups: list[Group] = [
        {"params": [parameters[name]], "lr": rate, "name": name, "kind": "given"}
        for name, rate in rates.items()
    ]
    # The exponent of the features' gradients.
    first = network.kinds.index(0)  # an embedding, where g = a + G
    G = solution.gradients[first] - network.a[first]
    groups += _of_layers(network, solution, at_base, groups, G)
    groups += _of_vectors(parameters, layers, rule, at_base, groups, G)
    owners = owners_of("optimizer_groups", layers, gains)
    for group in groups:
        group["rule"] = rule.name
        shrinks = group.pop("shrinks", 1.0)
        if group["kind"] != "given":
            factor = gains.get(owners.get(id(group["params"][0]), ""), 1.0)
            group["lr"] *= lr * factor * kinds.get(group["kind"], 1.0)
            if eps is not None:
                group["eps"] = eps * shrinks
        if weight_decay is not None:
            group["weight_decay"] = weight_decay * lr / group["lr"]
    return groups


def owners_of(
    where: str, layers: Sequence[AlignedLayer], gains: Mapping[str, float]
) -> dict[int, str]:
    """Return the first of the layers with a factor that uses a parameter, by the parameter's id.

    Raises:
        ValueError: there is no such layer.
    """
    _check_names("gains", gains, [layer.path for layer in layers], where=where)
    used = [layer for layer in reversed(layers) if layer.path in gains]
    return {id(p): layer.path for layer in used for p in layer.parameters}


def _of_layers(
    network: ModelNetwork, solution: MaxLRSolution, base: Base, groups: Sequence[Group], G: float
) -> list[Group]:
    """Return a group for each layer with parameters of its own, with rates for η = 1.

    "shrinks" is by how much the gradient is smaller than at the base width.
    """
    held = {id(p) for group in groups for p in group["params"]}
    found = []
    terms = zip(network.layers, network.kinds, solution.c, solution.gradients, strict=True)
    for layer, kind, c, g in terms:
        new = [p for p in dict.fromkeys(layer.parameters) if id(p) not in held]
        if not new:
            continue
        held.update(map(id, new))
        ratio = base.ratio(layer)
        # c and g are exponents of the fan-in; gradients of features shrink with the width.
        shrinks = base.ratio_of_groups(layer) ** -G if kind == 1 else 1.0
        rate = ratio**-c / (shrinks if network.rule.follows_gradient else 1.0)
        group = {"params": new, "lr": rate, "name": layer.path, "kind": _LAYER_KINDS[kind]}
        found.append({**group, "shrinks": ratio**-g * shrinks})
    return found


def _of_vectors(
    parameters: Mapping[str, nn.Parameter],
    layers: Sequence[AlignedLayer],
    rule: UpdateRule,
    base: Base,
    groups: Sequence[Group],
    G: float,
) -> list[Group]:
    """Return a group for each parameter that acts entry by entry, as `_of_layers` does."""
    held = {id(p) for group in groups for p in group["params"]}
    learning = {name: p for name, p in parameters.items() if p.requires_grad and id(p) not in held}
    readouts, others = (
        {id(p) for x in layers if (x.role == "readout") is last for p in x.entrywise}
        for last in (True, False)
    )
    unseen = [n for n, p in learning.items() if is_matrix(p) and id(p) not in readouts | others]
    if unseen:
        raise ValueError(
            f"optimizer_groups: which layers use {', '.join(unseen)} the probe's forward pass does "
            "not show (Alignment.refused may say why), so their width is not known: expected "
            "rates={name: learning rate} for them, or that they don't learn"
        )
    found = []
    for name, parameter in learning.items():
        # Gradients of outputs do not shrink as those of features do.
        g = 0.0 if id(parameter) in readouts - others else G
        ratio = base.ratio_of_vector(id(parameter), parameter.numel())
        rate = ratio**g if rule.follows_gradient else 1.0
        if not base.layers:
            rate *= _VECTOR_WIDTH ** ((G - g if rule.follows_gradient else 0.0) - 1)
        group = {"params": [parameter], "lr": rate, "name": name, "kind": "vector"}
        found.append({**group, "shrinks": ratio**-g})
    return found


def _check_number(argument: str, value: object) -> None:
    """Check that a learning rate or a factor is a finite number above 0."""
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        raise TypeError(f"optimizer_groups({argument}=…): got {value!r}, expected a number")
    number = float(value)
    if not 0 < number < math.inf:
        raise ValueError(
            f"optimizer_groups({argument}=…): got {value!r}, expected a finite number above 0"
        )


def _check_ratios(layers: Sequence[AlignedLayer], base: Base) -> None:
    """Check that the multipliers, if there are any, belong to this base."""
    for layer in layers:
        multiplier = multiplier_of(layer.module, layer.name)
        if multiplier is not None and abs(multiplier.ratio / base.ratio(layer) - 1) > 1e-6:
            raise ValueError(
                f"optimizer_groups(base=…): {layer.path!r} was parametrized as "
                f"{multiplier.ratio:g} times as wide as its base, and is {base.ratio(layer):g} "
                "times as wide as this one: expected the base that parametrize_model was given"
            )


def _check_names(
    argument: str, given: Iterable[str], known: Iterable[str], where: str = "optimizer_groups"
) -> None:
    if unknown := [name for name in given if name not in known]:
        raise ValueError(
            f"{where}({argument}=…): got {unknown[0]!r}, expected names among {', '.join(known)}"
        )
