"""Uses of parameters found by the functions' rules in some code, without the monitor's hooks."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from adiv_monitor.features import Features, OneHotFeatures
from adiv_monitor.features.uses import FunctionCall, Use, name_of, uses_in


def found(run: Callable[[], object], weights: Iterable[Tensor]) -> list[tuple[Use, Tensor]]:
    """Return all uses that the rules find, each with its function's result."""
    with Seen(weights) as seen:
        run()
    return seen.uses


class Seen(TorchFunctionMode):
    """Mode that applies the rules to every call."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()
        self.uses: list[tuple[Use, Tensor]] = []
        self._weights = {id(weight) for weight in weights}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        made = args[0] if func is Tensor.__setitem__ else result
        if isinstance(made, Tensor) and made.requires_grad:
            call = FunctionCall(made, self._of_model)
            with torch.no_grad():
                found = uses_in(name_of(func), call, args, kwargs or {})
            self.uses += [(use, made) for use in found if self._is_known(use)]
        return result

    def _of_model(self, value: object) -> bool:
        if not isinstance(value, Tensor):
            return True
        return id(value) in self._weights or (
            value._base is not None and id(value._base) in self._weights
        )

    def _is_known(self, use: Use) -> bool:
        return any(t is not None and self._of_model(t) for t in (use.weight, use.bias))


def layouts(inputs: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the same values in several memory layouts."""
    return [
        list(inputs),
        [x.transpose(0, -1).contiguous().transpose(0, -1) if x.dim() else x for x in inputs],
        [torch.stack([x, x], dim=-1)[..., 0] for x in inputs],
    ]


def trained_of(features: Features) -> Tensor:
    """Return (rows, 1): 0 for padding rows of one-hot features, otherwise 1."""
    if isinstance(features, OneHotFeatures):
        return features.trained[:, None]
    return torch.ones(1, 1, dtype=torch.float64)
