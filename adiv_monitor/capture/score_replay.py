"""An attention module run once more on some of its samples, up to its scores.

What lies between the projections and the scores differs from library to library: views, packed
weights, rotary positions, QK-norm, low-rank updates. So nothing is assumed of it: forward-mode
derivatives carry a change of the module's parameters through the module's own forward pass to the
queries and keys that reach `F.scaled_dot_product_attention`, and there the run ends. The inputs of
the module are held, as everywhere (*single-layer*), and all of its parameters move: those of values
and outputs do nothing to the scores.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from adiv_monitor.capture.randomness import restored_randomness
from adiv_monitor.features.rows import exact
from adiv_monitor.features.scores import Attention, Move, attention, by_head, of_heads

Parameters = Mapping[str, Tensor]
"""By their names in the module."""

ScaleOf = Callable[
    [Any, Sequence[Any], Mapping[str, Any], Any], Float[Tensor, "rows groups"] | None
]
"""(function, args, kwargs, output) → ‖φ_r‖² of the output's rows; None if nothing is trained by it.

Rows are the output's leading dimensions; its last one holds the channels, group by group.
"""


@dataclass(frozen=True)
class AttentionModule:
    """A module that holds projections and calls attention, and what to run it with.

    Attributes:
        module: itself.
        args: its inputs, on the samples that are looked at.
        kwargs: see args.
        parameters: values to run with of the trained ones, those before the step; the others are
            the module's own.
        calls: how often it calls attention.
    """

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    parameters: Parameters
    calls: int = 1


class Use(NamedTuple):
    """One use of trained parameters, in a run that records gradients.

    Attributes:
        z: its output.
        scale: ‖φ_r‖² of its rows.
    """

    z: Tensor
    scale: Float[Tensor, "rows groups"]


class Reached(NamedTuple):
    """The queries and keys of one call with the graph behind them, and the uses before it."""

    query: Float[Tensor, "samples heads queries width"]
    key: Float[Tensor, "samples heads keys width"]
    uses: list[Use]


def moves_of_scores(
    attends: AttentionModule, directions: Mapping[str, Parameters]
) -> list[tuple[Attention, dict[str, Move]]]:
    """Every attention call of the module, and how its queries and keys move with the parameters.

    Args:
        attends: the module.
        directions: by name, a change of some parameters: the tangents.

    Raises:
        RuntimeError: the module calls attention less often than it should, or uses a function
            that has no forward-mode derivative.
    """
    _load_forward_mode()
    found: list[tuple[Attention, dict[str, Move]]] = []
    for name, direction in directions.items():
        with forward_ad.dual_level(), torch.no_grad():
            duals = {
                key: _dual(value.detach(), direction.get(key))
                for key, value in attends.parameters.items()
            }
            reached = _run(attends, duals, _AttentionCalls(attends.calls)).arguments
            if not found:
                found = [(_plain(arguments), {}) for arguments in reached]
            for (_, moves), arguments in zip(found, reached, strict=True):
                moves[name] = _move(**arguments)
    return found


def scores_with_graph(
    attends: AttentionModule, scale_of: ScaleOf
) -> tuple[list[Reached], Parameters]:
    """Every attention call of the module with the graph that leads to it from the parameters.

    Args:
        attends: the module.
        scale_of: tells the uses of trained parameters among all functions called.

    Returns:
        The calls, and the leaves of the graph, by name.

    Raises:
        RuntimeError: the module calls attention less often than it should.
    """
    leaves = {name: value.detach().requires_grad_() for name, value in attends.parameters.items()}
    with torch.enable_grad():
        run = _run(attends, leaves, _AttentionCalls(attends.calls, scale_of))
        calls = []
        for arguments, uses in zip(run.arguments, run.uses_before, strict=True):
            query, key = by_head(arguments["query"]), by_head(arguments["key"])
            calls.append(Reached(query, of_heads(key, query.shape[1]), run.uses[:uses]))
    return calls, leaves


@functools.cache
def _load_forward_mode() -> None:
    """Some of torch's forward derivatives are loaded with the first one; one file warns then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import torch._decomp.decompositions_for_jvp  # noqa: F401


def _move(query: Tensor, key: Tensor, **_: Any) -> Move:
    heads = by_head(query).shape[1]
    dq, dk = (by_head(exact(_parts(dual)[1])) for dual in (query, key))
    return dq, of_heads(dk, heads)


def _dual(value: Tensor, tangent: Tensor | None) -> Tensor:
    if tangent is None:
        return value
    dual: Tensor = forward_ad.make_dual(value, tangent.to(value))  # type: ignore[no-untyped-call]
    return dual


def _parts(dual: Tensor) -> tuple[Tensor, Tensor]:
    """Value and tangent."""
    value, tangent = forward_ad.unpack_dual(dual)  # type: ignore[no-untyped-call]
    return value, torch.zeros_like(value) if tangent is None else tangent


def _plain(arguments: Mapping[str, Any]) -> Attention:
    values: dict[str, Any] = {
        name: _parts(value)[0] if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    return attention(**values)


class _ScoresReached(Exception):
    """Nothing that follows in the module is of interest."""


class _AttentionCalls(TorchFunctionMode):
    """Notes the arguments of the first so many attention calls, and ends the run with the last."""

    def __init__(self, calls: int, scale_of: ScaleOf | None = None) -> None:
        super().__init__()
        self.arguments: list[dict[str, Any]] = []
        self.uses: list[Use] = []
        self.uses_before: list[int] = []  # each of the calls
        self._calls = calls
        self._scale_of = scale_of

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            bound = _SIGNATURE.bind(*args, **kwargs).arguments
            with self:  # without weights to return, it calls the function that is looked for
                return _opened(**{**bound, "need_weights": False})
        if func is not functional.scaled_dot_product_attention:
            return self._noted(func, args, kwargs, func(*args, **kwargs))
        self.arguments.append({**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs})
        self.uses_before.append(len(self.uses))
        if len(self.arguments) == self._calls:
            raise _ScoresReached
        with sdpa_kernel(SDPBackend.MATH):  # the one that has a forward-mode derivative
            return func(*args, **kwargs)

    def _noted(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], z: Any) -> Any:
        scale = None if self._scale_of is None else self._scale_of(func, args, kwargs, z)
        if scale is None:
            return z
        self.uses.append(Use(z, scale))
        return z.clone()  # what is done to it in place is no part of the use


_ARGUMENTS = tuple(inspect.signature(attention).parameters)
_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)


def _without_overrides(function: Any) -> Callable[..., Any]:
    """The same function, asking no mode whether it wants to do it instead: what is inside shows."""
    blind = {**function.__globals__, "has_torch_function": lambda _: False}
    twin = FunctionType(function.__code__, blind, function.__name__, function.__defaults__)
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


_opened = _without_overrides(functional.multi_head_attention_forward)


def _run(
    attends: AttentionModule, parameters: Parameters, noting: _AttentionCalls
) -> _AttentionCalls:
    module = attends.module
    state = {**parameters, **{name: b.clone() for name, b in module.named_buffers()}}
    device = next(iter(parameters.values())).device
    with suppress(_ScoresReached), restored_randomness(device), noting:
        functional_call(module, state, tuple(attends.args), dict(attends.kwargs))
    if len(noting.arguments) < attends.calls:
        raise RuntimeError(
            f"{type(module).__name__}: got {len(noting.arguments)} calls of "
            f"F.scaled_dot_product_attention when run once more, expected {attends.calls}"
        )
    return noting
