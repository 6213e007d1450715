"""Which modules and parameters of a fork a mend is about."""

from collections.abc import Iterator, Sequence

from torch import nn

from adiv_monitor.audit.trials.mends.mend import DoesNotApply
from adiv_monitor.capture.selection import named_modules

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


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


def affine_at(model: nn.Module, layers: Sequence[str]) -> dict[str, nn.Module]:
    """The linear layers and convolutions among them that are called as modules.

    Raises:
        DoesNotApply: there are none.
    """
    inside = {
        id(m.out_proj) for m in model.modules() if isinstance(m, nn.MultiheadAttention)
    }  # read, not called
    found: dict[str, nn.Module] = {
        path: module
        for path, module in modules_at(model, layers).items()
        if isinstance(module, (nn.Linear, *CONVOLUTIONS)) and id(module) not in inside
    }
    if not found:
        raise DoesNotApply("there is no linear layer or convolution here")
    return found


def parameters_at(model: nn.Module, layers: Sequence[str]) -> Iterator[nn.Parameter]:
    """The parameters of these names, and those of the modules at these paths; all if none."""
    modules = {path: module for path, module in named_modules(model) if path in layers}
    inside = {id(p) for module in modules.values() for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if not layers or name in layers or id(parameter) in inside:
            yield parameter
