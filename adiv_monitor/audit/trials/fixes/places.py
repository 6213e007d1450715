"""Selection of the modules and parameters of a fork that a fix changes."""

from collections.abc import Iterator, Sequence

from torch import nn

from adiv_monitor.audit.trials.fixes.fix import DoesNotApply
from adiv_monitor.capture.selection import named_modules

AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def modules_at(model: nn.Module, layers: Sequence[str]) -> dict[str, nn.Module]:
    """Return the modules at these paths, as reports name them; all modules if there are no paths.

    Several functions of one module have names such as `path#2`, which is the module at `path`.

    Raises:
        DoesNotApply: There are paths, but no module at any of them.
    """
    every = dict(named_modules(model))
    if not layers:
        return every
    paths = dict.fromkeys(layer.partition("#")[0] for layer in layers)
    found = {path: every[path] for path in paths if path in every}
    if not found:
        raise DoesNotApply(f"the model has no module at {', '.join(map(repr, paths))}")
    return found


def affine_at(model: nn.Module, layers: Sequence[str]) -> list[nn.Module]:
    """Return the linear layers and convolutions at these paths, or inside the modules there.

    A module without any, such as an activation function, stands for the layer before it. Without
    paths all such layers are returned.

    Raises:
        DoesNotApply: There are none.
    """
    found = [layer for _, layer in in_front(model, layers)]
    return list(dict.fromkeys(found))


def in_front(model: nn.Module, layers: Sequence[str]) -> list[tuple[nn.Module, nn.Module]]:
    """Return modules at or inside these paths, each with the affine layer that it is or follows.

    Raises:
        DoesNotApply: There are none.
    """
    affine = _affine(model)
    found = []
    for module in modules_at(model, layers).values() if layers else [model]:
        inside = [m for m in module.modules() if m in affine]
        before = [] if inside else _before(model, module, affine)
        found += [(m, m) for m in inside] or [(module, m) for m in before]
    if not found:
        raise DoesNotApply("there is no linear layer or convolution here")
    return list(dict.fromkeys(found))


def _affine(model: nn.Module) -> set[nn.Module]:
    """Return the affine layers that are called as modules.

    Attention uses the weight of its last layer without a call.
    """
    read = {m.out_proj for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    return {m for m in model.modules() if isinstance(m, AFFINE) and m not in read}


def _before(model: nn.Module, module: nn.Module, affine: set[nn.Module]) -> list[nn.Module]:
    """Return the last affine layer before the module in the model's order, as a list."""
    order = list(model.modules())
    return [m for m in order[: order.index(module)] if m in affine][-1:]


def parameters_at(model: nn.Module, layers: Sequence[str]) -> Iterator[nn.Parameter]:
    """Yield the parameters of these names or inside the modules at these paths; by default all."""
    modules = {path: module for path, module in named_modules(model) if path in layers}
    inside = {id(p) for module in modules.values() for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if not layers or name in layers or id(parameter) in inside:
            yield parameter
