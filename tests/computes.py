"""A module of given parts that computes a given function."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Computes(nn.Module):
    """A module whose forward is a function of the module and its inputs.

    Args:
        function: called as (module, *inputs).
        parts: submodules, parameters, tensors and settings of the module.
    """

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)
