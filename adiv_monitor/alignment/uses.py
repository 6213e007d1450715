"""Which calls of functions are maps by a weight, and what rows of inputs the weight multiplies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from adiv_monitor.features.functions.conv import convolution
from adiv_monitor.features.rows import Rows
from adiv_monitor.features.uses import FunctionCall


@dataclass(frozen=True, eq=False)
class WeightUse:
    """One call that maps an input by a weight. It refers to activations and must not be kept.

    Attributes:
        kind: "linear", "convolution" or "embedding".
        weight: the weight, as the function got it.
        shape: of the result, without its channels.
        rows: the inputs of chosen rows: (rows, groups, fan-in), or (rows,) tokens of an embedding.
        groups: into how many independent blocks the weight falls.
        transposed: the weight, as the function got it, is (fan-in, outputs).
    """

    kind: str
    weight: Tensor
    shape: tuple[int, ...]
    rows: Callable[[Rows], Tensor]
    groups: int = 1
    transposed: bool = False


def blocks(weight: Tensor, groups: int, *, transposed: bool) -> Tensor:
    """The weight as (groups, outputs, fan-in)."""
    return weight.t()[None] if transposed else weight.reshape(groups, weight.shape[0] // groups, -1)


def weight_use(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: object
) -> WeightUse | None:
    """The use that this call is, if it is one."""
    rule = _RULES.get(function)
    if rule is None or not isinstance(result, Tensor):
        return None
    return rule(result, *args, **kwargs)


def _linear(result: Tensor, input: Tensor, weight: Tensor, bias: object = None) -> WeightUse:
    return WeightUse("linear", weight, result.shape[:-1], lambda rows: rows.take(input)[:, None])


def _product(result: Tensor, input: Tensor, other: Tensor, **_: object) -> WeightUse | None:
    """X W, with a weight that is stored (fan-in, outputs)."""
    if not isinstance(other, Tensor) or other.dim() != 2 or input.dim() < 2:
        return None
    return WeightUse(
        *("linear", other, result.shape[:-1], lambda rows: rows.take(input)[:, None]),
        transposed=True,
    )


def _sum_and_product(
    result: Tensor, bias: Tensor, input: Tensor, weight: Tensor, **_: object
) -> WeightUse | None:
    return _product(result, input, weight)


def _convolution(
    result: Tensor, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any
) -> WeightUse:
    call = FunctionCall(result, lambda value: False)
    use = convolution(call, input, weight, *args, **kwargs)
    dims = weight.dim() - 2
    groups = args[4] if len(args) > 4 else kwargs.get("groups", 1)

    def rows(chosen: Rows) -> Tensor:
        phi: Tensor = use.features(chosen).phi  # type: ignore[attr-defined]  # dense features
        return phi

    shape = (*result.shape[: -dims - 1], *result.shape[-dims:])
    return WeightUse("convolution", weight, shape, rows, groups)


def _embedding(result: Tensor, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> WeightUse:
    flat = input.reshape(-1)

    def rows(chosen: Rows) -> Tensor:
        return flat.clone() if chosen.chosen is None else flat[chosen.flat]

    return WeightUse("embedding", weight, tuple(input.shape), rows)


_RULES: dict[Callable[..., Any], Callable[..., WeightUse | None]] = {
    functional.linear: _linear,
    functional.conv1d: _convolution,
    functional.conv2d: _convolution,
    functional.conv3d: _convolution,
    functional.embedding: _embedding,
    torch.addmm: _sum_and_product,
    torch.mm: _product,
    torch.matmul: _product,
    Tensor.mm: _product,
    Tensor.matmul: _product,
}
