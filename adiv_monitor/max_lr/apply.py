"""A parametrization put onto a model: initialisation, multipliers, learning rates per layer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from adiv_monitor.alignment.instrument import Alignment
from adiv_monitor.alignment.layers import AlignedLayer, is_matrix
from adiv_monitor.alignment.probe import Probe
from adiv_monitor.max_lr.exponents import Parametrization
from adiv_monitor.max_lr.model import ModelNetwork
from adiv_monitor.max_lr.network import Network
from adiv_monitor.max_lr.optimizers import UpdateRule, update_rule
from adiv_monitor.max_lr.stability import feature_gradient_exponent


class Multiplier(nn.Module):
    """The weight times a constant, n^(−a)."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, weight: Tensor) -> Tensor:
        """What the layer uses."""
        return weight * self.factor

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What is stored so that the layer uses this."""
        return weight / self.factor


def parametrize_model(
    model: nn.Module,
    probe: Probe,
    parametrization: str | Parametrization,
    *,
    scale: float | Mapping[str, float] = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[AlignedLayer, ...]:
    """Initialise a model's layers, W ~ N(0, (σ n^(−b))²), and multiply them by n^(−a).

    n is the fan-in of hidden layers and readouts, the fan-out of embeddings. σ is `scale`, in an
    embedding that is a linear layer or a convolution over the root of its fan-in, which does not
    grow with width. The code of the model stays as it is: multipliers other than 1 are
    parametrizations of torch's, the optimizer holds the same parameters. Excluded layers, biases
    and norms are left alone.

    Args:
        model: the model.
        probe: shows its layers; see `Alignment`.
        parametrization: "sp", "ntk", "mup", "mfp", or one of yours.
        scale: σ for all layers, or by layer (1 where there is none).
        generator: of the random numbers; None: torch's own.

    Returns:
        The layers, for `optimizer_groups`.

    Raises:
        ValueError: `scale` names no layer, the model has multipliers already, or a layer's weight
            is made in its forward pass.
    """
    if any(isinstance(module, Multiplier) for module in model.modules()):
        raise ValueError(
            f"parametrize_model: {type(model).__name__} has multipliers already, expected a model "
            "that was not parametrized: build it anew"
        )
    layers = Alignment(model, probe).layers
    network = ModelNetwork.of(layers, parametrization, update_rule("adam"))
    scales = scale if isinstance(scale, Mapping) else dict.fromkeys(network.paths, scale)
    if unknown := scales.keys() - set(network.paths):
        raise ValueError(
            f"parametrize_model(scale=…): got {min(unknown)!r}, expected layers among "
            f"{', '.join(network.paths)}"
        )
    exponents = zip(network.layers, network.a, network.b, strict=True)
    chosen = [(layer, a, b) for layer, a, b in exponents if layer.role != "excluded"]
    if made := [layer.path for layer, *_ in chosen if layer.is_made]:
        raise ValueError(
            f"parametrize_model: the weight of {made[0]!r} is made in the forward pass, where "
            "neither its size nor a multiplier can be set: expected it to be a parameter or a "
            f"parametrization of torch's, or Probe(roles={{{made[0]!r}: 'excluded'}})"
        )
    # A place may be that of several layers: packed projections share a multiplier.
    places = {(layer.module, layer.name): layer.width**-a for layer, a, _ in chosen if a}
    for (module, name), factor in places.items():
        parametrize.register_parametrization(module, name, Multiplier(factor))
    begun: set[int] = set()
    for layer, _, b in chosen:
        sigma = scales.get(layer.path, 1.0) * layer.width**-b
        if layer.role == "embedding" and not layer.is_table:
            sigma /= layer.fan_in**0.5
        for parameter in layer.parameters:
            if id(parameter) not in begun:
                begun.add(id(parameter))
                with torch.no_grad():
                    parameter.normal_(0, sigma, generator=generator)
    return layers


def optimizer_groups(
    model: nn.Module,
    layers: Sequence[AlignedLayer],
    parametrization: str | Parametrization,
    optimizer: str | UpdateRule | Sequence[float],
    *,
    lr: float,
    eps: float | None = None,
    gains: Mapping[str, float] | None = None,
    rates: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups with η n^(−c) for each layer, c that under full alignment.

    What acts entry by entry, biases and norms, learns as an embedding without multiplier does, at a
    rate by its own length; at η where it acts on what readouts give, and on nothing else. Excluded
    layers learn at their c, too. A matrix that the probe's forward pass does not show has no width.

    Args:
        model: the model.
        layers: of `parametrize_model`, or of `Alignment(model, probe)`.
        parametrization: that of the model.
        optimizer: see `solve_max_lr`.
        lr: η.
        eps: ε of Adam at width 1; it then shrinks as gradients do, n^(−g). None: not in the groups.
        gains: layer → further factor of its rate, such as `MaxLRScheduler.proposed` of another run.
        rates: name of a parameter → its learning rate, whatever uses it.

    Raises:
        ValueError: the exponents have no solution, matrices learn that no layer uses, or layers or
            names are not the model's.
    """
    rule = update_rule(optimizer)
    parameters = _named(model, layers, gains or {}, rates or {})
    network = ModelNetwork.of(layers, parametrization, rule)
    solution = network.solve({})
    if solution.status != "optimal":
        raise ValueError(f"optimizer_groups: {solution.status}: {solution.message}")
    groups: dict[int, dict[str, Any]] = {
        id(parameters[name]): {"params": [parameters[name]], "lr": rate, "name": name}
        for name, rate in (rates or {}).items()
    }
    for layer, c, g in zip(network.layers, solution.c, solution.gradients, strict=True):
        new = [p for p in layer.parameters if id(p) not in groups]
        if not new:
            continue
        factor = (gains or {}).get(layer.path, 1.0)
        group = {"params": new, "lr": lr * factor * layer.width**-c, "name": layer.path}
        if eps is not None:
            group["eps"] = eps * layer.width**-g
        groups |= dict.fromkeys(map(id, new), group)
    found = list({id(group): group for group in groups.values()}.values())
    features = _features_gradient(network, solution.c)
    of_readouts, of_others = (
        {id(p) for x in layers if (x.role == "readout") is last for p in x.entrywise}
        for last in (True, False)
    )
    unseen = []
    for name, parameter in parameters.items():
        if id(parameter) in groups or not parameter.requires_grad:
            continue
        if is_matrix(parameter) and id(parameter) not in of_readouts | of_others:
            unseen.append(name)
        G = 0.0 if id(parameter) in of_readouts - of_others else features
        c = -G if rule.follows_gradient else 0.0
        group = {"params": [parameter], "lr": lr * parameter.numel() ** -c, "name": name}
        if eps is not None:
            group["eps"] = eps * parameter.numel() ** -G
        found.append(group)
    if unseen:
        raise ValueError(
            f"optimizer_groups: which layers use {', '.join(unseen)} the probe's forward pass does "
            "not show (Alignment.refused may say why), so their width is not known: expected "
            "rates={name: learning rate} for them, or that they don't learn"
        )
    return found


def _named(
    model: nn.Module,
    layers: Sequence[AlignedLayer],
    gains: Mapping[str, float],
    rates: Mapping[str, float],
) -> dict[str, nn.Parameter]:
    """The parameters of the model, of which these layers, factors and rates have to be."""
    parameters = dict(model.named_parameters())
    theirs = {id(p) for p in parameters.values()}
    strange = [x.path for x in layers if not theirs.issuperset(map(id, x.parameters))]
    if strange:
        raise ValueError(
            f"optimizer_groups(layers=…): {strange[0]!r} trains what {type(model).__name__} does "
            "not hold, expected layers of this very model"
        )
    paths = [layer.path for layer in layers]
    for argument, given, known in (("gains", gains, paths), ("rates", rates, [*parameters])):
        if unknown := [name for name in given if name not in known]:
            raise ValueError(
                f"optimizer_groups({argument}=…): got {unknown[0]!r}, expected names among "
                f"{', '.join(known)}"
            )
    return parameters


def _features_gradient(network: ModelNetwork, c: Sequence[float]) -> float:
    """G, the exponent of gradients of features."""
    places = {path: i for i, path in enumerate(network.paths)}
    before = tuple(tuple(places[p] for p in x.predecessors) for x in network.layers)
    return feature_gradient_exponent(Network(network.a, network.b, network.rule, before), c)
