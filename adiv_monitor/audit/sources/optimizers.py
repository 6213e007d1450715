"""Optimizers by name or import path."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adiv_monitor.audit.options.usage import UsageError, blamed
from adiv_monitor.audit.sources.imported import imported
from adiv_monitor.audit.training.setup import OptimizerFactory

_NAMED: Mapping[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
}


def named(name: str, arguments: Mapping[str, Any]) -> Optimizer | OptimizerFactory:
    """Return the optimizer of that name, or a function that makes it for a model.

    Args:
        name: Name of a class in torch.optim, in any case ("adamw"); or the import path of an
            optimizer class, called with the parameters and the arguments, of a function, called
            with the model and the arguments, or of an optimizer that exists.
        arguments: Keyword arguments.

    Raises:
        UsageError: There is no such optimizer. The returned function raises it if the optimizer
            can't be made with these arguments.
    """
    found = _NAMED.get(name.lower())
    made: Any = found if found is not None else _imported(name)
    if isinstance(made, Optimizer):
        if arguments:
            raise UsageError(
                f"--optimizer {name}: is an instance of {type(made).__name__}, which takes no "
                "--optimizer-args; give its class, or leave them out"
            )
        return made
    takes_parameters = inspect.isclass(made) and issubclass(made, Optimizer)

    def optimizer(model: nn.Module) -> Optimizer:
        with blamed(f"--optimizer {name} with --optimizer-args {dict(arguments)}"):
            made_one = made(model.parameters() if takes_parameters else model, **arguments)
        if not isinstance(made_one, Optimizer):
            raise UsageError(
                f"--optimizer {name}: gave {type(made_one).__name__}, expected a "
                "torch.optim.Optimizer"
            )
        return made_one

    return optimizer


def _imported(name: str) -> Any:
    if "." not in name and ":" not in name:
        known = ", ".join(sorted(kind.__name__ for kind in _NAMED.values()))
        raise UsageError(
            f"--optimizer {name}: there is none of that name; expected one of {known}, or an "
            "import path such as package.module:name"
        )
    found = imported(name, "--optimizer")
    if not callable(found) and not isinstance(found, Optimizer):
        raise UsageError(
            f"--optimizer {name}: got a {type(found).__name__}, expected an optimizer, its class, "
            "or a function model → optimizer"
        )
    return found
