"""Which modules and parameters of a fork a fix is about."""

from collections.abc import Iterator, Sequence

from torch import nn

from adiv_monitor.audit.trials.fixes.fix import DoesNotApply
from adiv_monitor.capture.selection import named_modules

AFFINE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def modules_at(model: nn.Module, layers: Sequence[str]) -> dict[str, nn.Module]:
    """The modules at these paths, as reports name them; all modules if there are no paths.

    Several functions of one module are told apart as `path#2`: that is the module at `path`.

    Raises:
        DoesNotApply: there is a path, but no module at any of them.
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
    """The linear layers and convolutions at these paths, or inside the modules there.

    Where there is none, as in an activation function, it is the one before it. All, if there are
    no paths.

    Raises:
        DoesNotApply: there are none.
    """
    found = [layer for _, layer in in_front(model, layers)]
    return list(dict.fromkeys(found))


def in_front(model: nn.Module, layers: Sequence[str]) -> list[tuple[nn.Module, nn.Module]]:
    """Modules at these paths, or inside, each with the layer of `affine_at` that it is or follows.

    Raises:
        DoesNotApply: there are none.
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
    """Those that are called as modules: attention reads its last layer's weight itself."""
    read = {m.out_proj for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    return {m for m in model.modules() if isinstance(m, AFFINE) and m not in read}


def _before(model: nn.Module, module: nn.Module, affine: set[nn.Module]) -> list[nn.Module]:
    """The last of these before the module, in the model's order."""
    order = list(model.modules())
    return [m for m in order[: order.index(module)] if m in affine][-1:]


def parameters_at(model: nn.Module, layers: Sequence[str]) -> Iterator[nn.Parameter]:
    """The parameters of these names, and those of the modules at these paths; all if none."""
    modules = {path: module for path, module in named_modules(model) if path in layers}
    inside = {id(p) for module in modules.values() for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if not layers or name in layers or id(parameter) in inside:
            yield parameter
