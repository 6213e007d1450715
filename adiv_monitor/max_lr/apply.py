"""Application of a parametrization to a model: initialisation and multipliers of its layers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isclose

import torch
from torch import nn
from torch.nn.utils import parametrize

from adiv_monitor.alignment.instrument import Alignment
from adiv_monitor.alignment.layers import AlignedLayer
from adiv_monitor.alignment.probe import Probe
from adiv_monitor.max_lr.base import Base
from adiv_monitor.max_lr.checkpoints import accept_plain
from adiv_monitor.max_lr.exponents import Parametrization, parametrization_named
from adiv_monitor.max_lr.model import ModelNetwork
from adiv_monitor.max_lr.multiplier import Multiplier
from adiv_monitor.max_lr.optimizers import update_rule


def parametrize_model(
    model: nn.Module,
    probe: Probe,
    parametrization: str | Parametrization,
    *,
    base: Sequence[AlignedLayer] | None = None,
    scale: float | Mapping[str, float] = 1.0,
    generator: torch.Generator | None = None,
) -> tuple[AlignedLayer, ...]:
    """Initialise a model's layers, W ~ N(0, (σ (n/n₀)^(−b))²), and multiply them by (n/n₀)^(−a).

    n is the fan-in of hidden layers and readouts, and the fan-out of embeddings; n₀ is that of the
    same layer in the base model, and σ the root mean square of its weight there. So at the base
    width the weights keep their size, and a learning rate tuned there fits other widths. Without a
    base n₀ and σ are 1, except in an embedding that is a linear layer or a convolution: there σ is
    1 over the root of its fan-in, which does not grow with width. The model's code does not change:
    multipliers are torch parametrizations, and the optimizer holds the same parameters. Excluded
    layers, biases and norms do not change.

    Args:
        model: the model.
        probe: the probe that finds its layers; see `Alignment`.
        parametrization: "sp", "ntk", "mup", "mfp", or one of yours.
        base: layers of the same model, initialised at the base width, as in
            `Alignment(build(64), probe).layers`.
        scale: factor of σ for all layers, or by layer; 1 for layers without an entry.
        generator: generator of the random numbers; None: torch's own.

    Returns:
        The layers, for `optimizer_groups`.

    Raises:
        ValueError: `scale` names no layer, the parametrization is unstable, the model or the base
            has multipliers already, the base has other layers, or one weight of one module needs
            two multipliers.
    """
    if any(isinstance(module, Multiplier) for module in model.modules()):
        raise ValueError(
            f"parametrize_model: {type(model).__name__} has multipliers already, expected a model "
            "that was not parametrized: build it anew"
        )
    layers = Alignment(model, probe).layers
    network = ModelNetwork.of(layers, parametrization, update_rule("adam"), is_applied=False)
    if wrong := network.unstable:
        raise ValueError(f"parametrize_model(parametrization={parametrization!r}): {wrong}")
    scales = scale if isinstance(scale, Mapping) else dict.fromkeys(network.paths, scale)
    if unknown := scales.keys() - set(network.paths):
        raise ValueError(
            f"parametrize_model(scale=…): got {min(unknown)!r}, expected layers among "
            f"{', '.join(network.paths)}"
        )
    exponents = zip(network.layers, network.a, network.b, strict=True)
    chosen = [(layer, a, b) for layer, a, b in exponents if layer.role != "excluded"]
    known = Base.of(layers, base)
    _multiply([(layer, known.ratio(layer), a) for layer, a, _ in chosen], parametrization)
    begun: set[int] = set()
    for layer, _, b in chosen:
        factor = scales.get(layer.path, 1.0) * known.ratio(layer) ** -b
        for place, parameter in enumerate(layer.weights):
            if parameter.requires_grad and id(parameter) not in begun:
                begun.add(id(parameter))
                with torch.no_grad():
                    parameter.normal_(0, factor * known.sigma(layer, place), generator=generator)
    return layers


def _multiply(
    chosen: Sequence[tuple[AlignedLayer, float, float]], parametrization: str | Parametrization
) -> None:
    """Register the multipliers of (layer, n/n₀, a).

    Raises:
        ValueError: one weight of one module needs two multipliers.
    """
    # Several layers may share a place: packed projections have one multiplier.
    places: dict[tuple[nn.Module, str], tuple[str, float, float]] = {}
    for layer, ratio, a in chosen:
        path, *first = places.setdefault((layer.module, layer.name), (layer.path, ratio, a))
        both = first[0] ** -first[1], ratio**-a
        if not isclose(*both):
            raise ValueError(
                f"parametrize_model: {path!r} and {layer.path!r} are one weight of one module, "
                f"which has to be multiplied by {both[0]:g} and by {both[1]:g}: expected "
                "the second use in a module of its own (head.weight = embedding.weight)"
            )
    of = parametrization_named(parametrization)
    factors: dict[int, set[float]] = defaultdict(set)  # by parameter, over all of its uses
    for layer, ratio, a in chosen:
        for parameter in layer.weights:
            factors[id(parameter)].add(ratio**-a)
    for (module, name), (_, ratio, a) in places.items():
        if a != 0:
            shared = any(len(factors[id(p)]) > 1 for p in module.parameters(recurse=False))
            parametrize.register_parametrization(module, name, Multiplier(ratio, a, of))
            if not shared:
                accept_plain(module)
