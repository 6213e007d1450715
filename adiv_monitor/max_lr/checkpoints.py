"""Conversion of state dicts between parametrized models and models without multipliers."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from adiv_monitor.max_lr.multiplier import Multiplier, multiplier_of


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of an equal model without multipliers: its weights are multiplied.

    A model that was not parametrized loads it and computes the same function. In the other
    direction, `load_state_dict` of a parametrized model accepts both kinds of state dicts.

    Args:
        model: a model that was passed to `parametrize_model`.

    Raises:
        ValueError: a weight has other parametrizations too, or is shared by layers that multiply it
            by different numbers, which a model without multipliers cannot represent.
    """
    state = dict(model.state_dict())
    factors: dict[int, set[float]] = defaultdict(set)
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, parametrize.ParametrizationList):
            continue
        for parameter in module.parameters(recurse=False):
            factors[id(parameter)].add(1.0)
        for name, multiplier in _multipliers(module):
            start = f"{path}." if path else ""
            makers: Any = module.parametrizations[name]
            if len(makers) > 1:
                raise ValueError(
                    f"plain_state_dict: {start}{name} has {len(makers)} parametrizations, expected "
                    "that of its multiplier alone"
                )
            factors[id(makers.original)].add(multiplier.factor)
            if len(factors[id(makers.original)]) > 1:
                raise ValueError(
                    f"plain_state_dict: {start}{name} is shared by layers that multiply it by "
                    "different numbers, expected layers with weights of their own"
                )
            original = state.pop(f"{start}parametrizations.{name}.original")
            state[f"{start}{name}"] = original * multiplier.factor
    return state


def accept_plain(module: nn.Module) -> None:
    """Let a module with multipliers load state dicts of modules without; see `plain_state_dict`."""
    module.register_load_state_dict_pre_hook(_from_plain)  # type: ignore[no-untyped-call]


def _from_plain(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    for name, multiplier in _multipliers(module):
        original = f"{prefix}parametrizations.{name}.original"
        if f"{prefix}{name}" in state and original not in state:
            state[original] = multiplier.right_inverse(state.pop(f"{prefix}{name}"))


def _multipliers(module: nn.Module) -> Iterator[tuple[str, Multiplier]]:
    """Yield the names of a module's weights that have a multiplier, and the multipliers."""
    names = module.parametrizations if parametrize.is_parametrized(module) else ()
    for name in names:  # type: ignore[union-attr]
        multiplier = multiplier_of(module, name)
        if multiplier is not None:
            yield name, multiplier
