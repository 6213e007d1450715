"""Reruns an attention module on some of its samples, up to its scores.

Libraries differ in the operations between the projections and the scores: views, packed weights,
rotary positions, QK-norm, low-rank updates. Nothing is therefore assumed about them. A twin of the
module carries a change of its parameters through its own forward pass to the queries and keys that
reach `F.scaled_dot_product_attention`, where the run ends. The inputs of the module are constant,
as everywhere (*single-layer*), and all of its parameters change: those of values and outputs have
no effect on the scores.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from adiv_monitor.capture.forwards import without_overrides
from adiv_monitor.features import uses
from adiv_monitor.features.registry import Rule, find_rule, use_of
from adiv_monitor.features.rows import Rows, floats_to_compute_dtype, to_compute_dtype
from adiv_monitor.features.scores import Attention, Move, attention, by_head, of_heads
from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.derivatives import Parameters
from adiv_monitor.rerun.nested import tensors_in
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.surroundings import Surroundings
from adiv_monitor.rerun.twin import Twin


@dataclass(frozen=True)
class AttentionModule:
    """A module that holds projections and calls attention, with the parameters to run it with.

    Attributes:
        twin: the twin of the module, see `twin_of`.
        parameters: the trained parameters' values before the step; the others are the module's own.
        calls: the number of attention calls after which the run may end.
        samples: the chosen samples of the queries, (chosen,) int64; None: all.
    """

    twin: Twin
    parameters: Parameters
    calls: int = 1
    samples: Tensor | None = None


def twin_of(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    parameters: Parameters,
    written: Mapping[int, Tensor] = MappingProxyType({}),
) -> Twin:
    """Return a twin of an attention module, in compute precision.

    Args:
        module: the module.
        args: its inputs on the chosen samples.
        kwargs: see args.
        parameters: the parameters that it will run with, for their names and device.
        written: id → value of a buffer at the beginning of the forward that is repeated, if it
            differs from the present value.

    Raises:
        RuntimeError: the module can't be copied.
    """
    kwargs = dict(kwargs)
    if isinstance(module, nn.MultiheadAttention):  # else it computes scores itself
        kwargs["need_weights"] = False
    own = {id(p): p for name, p in module.named_parameters() if name in parameters}
    surroundings = Surroundings(Randomness([next(iter(parameters.values())).device]))
    with _saying(module):
        return Twin(
            module, (tuple(args), kwargs), surroundings, written, own, floats_to_compute_dtype
        )


class ScaledUse(NamedTuple):
    """One use of trained parameters, in a run that records gradients.

    Attributes:
        z: its output.
        scale: ‖φ_r‖² of its rows, for the trained parameters.
        layout: (tensor shaped like the output) → rows in front, channels in the last dimension,
            group by group.
    """

    z: Tensor
    scale: Float[Tensor, "rows groups"]
    layout: Callable[[Tensor], Tensor] = uses.as_it_is


class Reached(NamedTuple):
    """The queries and keys of one call with their graph, and the uses before the call."""

    query: Float[Tensor, "samples heads queries width"]
    key: Float[Tensor, "samples heads keys width"]
    uses: list[ScaledUse]


def moves_of_scores(
    attends: AttentionModule, direction: Parameters
) -> list[tuple[Attention, Move]]:
    """Return every attention call of the module, with the moves of its queries and keys.

    Args:
        attends: the module.
        direction: a change of some parameters: the tangents.

    Raises:
        Refused: the module makes fewer attention calls than expected.
        RuntimeError: it fails, or uses a function without derivatives.
    """
    values = {
        name: floats_to_compute_dtype(value.detach()) for name, value in attends.parameters.items()
    }

    def run(module: nn.Module, call: Callable[[], object]) -> list[dict[str, Any]]:
        return _AttentionCalls(attends.calls).seen(module, call).arguments

    with _saying(attends.twin.module):
        reached, moved = attends.twin.jvp(values, direction, run)
    found: list[tuple[Attention, Move]] = []
    for arguments, of_call in zip(reached, moved, strict=True):
        dq, dk = _of_equal_shape(
            to_compute_dtype(of_call["query"]), to_compute_dtype(of_call["key"])
        )
        if attends.samples is not None:
            dq, dk = (move.index_select(0, attends.samples) for move in (dq, dk))
        found.append((attention(**arguments, samples=attends.samples), (dq, dk)))
    return found


def scores_with_graph(attends: AttentionModule) -> tuple[list[Reached], Parameters]:
    """Return every attention call of the module, on all samples, with the graph that leads to it.

    The uses of parameters before it are those that function rules describe.

    Args:
        attends: the module.

    Returns:
        The calls, and the leaves of the graph, by name.

    Raises:
        Refused: the module makes fewer attention calls than expected.
        RuntimeError: it fails.
    """
    leaves = {
        n: floats_to_compute_dtype(p).detach().requires_grad_()
        for n, p in attends.parameters.items()
    }
    noting = _AttentionCalls(attends.calls, leaves.values())
    with _saying(attends.twin.module):
        attends.twin.run(leaves, noting.seen)
    with torch.enable_grad():
        pairs = [_of_equal_shape(each["query"], each["key"]) for each in noting.arguments]
    used = (noting.uses[:before] for before in noting.uses_before)
    return [Reached(*pair, before) for pair, before in zip(pairs, used, strict=True)], leaves


def _of_equal_shape(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return both by sample and head, with equal numbers of samples and heads."""
    query = by_head(query)
    return query, of_heads(by_head(key), query.shape[1]).expand(len(query), -1, -1, -1)


class _ScoresReached(Exception):
    """Raised to end the run of a module at its scores."""


class _AttentionCalls(TorchFunctionMode):
    """Records the arguments of a number of attention calls, and ends the run at the last one.

    Args:
        calls: the number of calls.
        leaves: the parameters whose uses are recorded too; None: none are recorded.
    """

    def __init__(self, calls: int, leaves: Iterable[Tensor] | None = None) -> None:
        super().__init__()
        self.arguments: list[dict[str, Any]] = []
        self.uses: list[ScaledUse] = []
        self.uses_before: list[int] = []  # the number of uses before each call
        self._calls = calls
        self._notes_uses = leaves is not None
        self._state = set(map(id, leaves or ()))  # of all parameters and buffers that the run uses
        self._inside = 0  # the number of running modules with rules of their own

    def seen(self, module: nn.Module, call: Callable[[], object]) -> Self:
        """Run the module up to the last attention call, and return self."""
        self._state |= {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        with suppress(_ScoresReached), self._by_rules(module), self:
            call()
        if len(self.arguments) < self._calls:
            raise Refused(
                f"{type(module).__name__}: got {len(self.arguments)} calls of "
                f"F.scaled_dot_product_attention when run once more, expected {self._calls}"
            )
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            bound = _SIGNATURE.bind(*args, **kwargs).arguments
            with self:  # without weights to return, it calls the fused function
                return _opened(**{**bound, "need_weights": False})
        if func is not functional.scaled_dot_product_attention:
            return self._noted(func, args, kwargs, func(*args, **kwargs))
        self.arguments.append({**dict(zip(ARGUMENTS, args, strict=False)), **kwargs})
        self.uses_before.append(len(self.uses))
        if len(self.arguments) == self._calls:
            raise _ScoresReached
        return func(*args, **kwargs)

    def _noted(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], z: Any) -> Any:
        given = tensors_in(*args, *kwargs.values())
        if not self._notes_uses or self._inside or not any(map(_is_trained, given)):
            return z
        if not isinstance(z, Tensor) or not z.requires_grad:
            return z
        name, call = uses.name_of(func), uses.FunctionCall(z, self._of_model)
        with torch.no_grad():
            return self._with(z, uses.uses_in(name, call, tuple(args), dict(kwargs)))

    def _with(self, z: Tensor, found: Iterable[uses.Use]) -> Tensor:
        """Record uses and return a copy of their output, which in-place changes leave alone."""
        count = len(self.uses)
        self.uses += [use for each in found if (use := _with_scale(each, z)) is not None]
        with torch.enable_grad():
            return z.clone() if len(self.uses) > count else z

    @contextmanager
    def _by_rules(self, module: nn.Module) -> Iterator[None]:
        """Record modules with rules of their own as uses."""
        with ExitStack() as hooks:
            for each in module.modules() if self._notes_uses else ():
                rule = find_rule(each)
                if isinstance(rule, Rule):
                    ends = partial(self._rule_ends, rule)
                    before = each.register_forward_pre_hook(self._rule_begins)
                    after = each.register_forward_hook(ends, with_kwargs=True)
                    hooks.callback(before.remove)
                    hooks.callback(after.remove)
            yield

    def _rule_begins(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._inside += 1

    def _rule_ends(
        self,
        rule: Rule,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        z: Tensor,
    ) -> Tensor:
        with torch.no_grad():
            z = self._with(z, [use_of(rule, module, args, kwargs)])
        self._inside -= 1
        return z

    def _of_model(self, value: object) -> bool:
        base = value._base if isinstance(value, Tensor) else None
        return not isinstance(value, Tensor) or id(value) in self._state or id(base) in self._state


def _is_trained(tensor: Tensor | None) -> bool:
    """Return whether it is a changing parameter or its view; inputs have no gradient."""
    if tensor is None or not tensor.requires_grad:
        return False
    return tensor.is_leaf or (tensor._base is not None and tensor._base.is_leaf)


def _with_scale(use: uses.Use, z: Tensor) -> ScaledUse | None:
    weight, bias = _is_trained(use.weight), _is_trained(use.bias)
    if not weight and not bias:
        return None
    every = Rows(tuple(use.layout(z).shape[:-1]), None, z.device)
    scale = use.features(every).restrict(weight=weight, bias=bias).scale()
    return None if scale is None else ScaledUse(z, scale, use.layout)


ARGUMENTS = tuple(inspect.signature(attention).parameters)
_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)
_opened = without_overrides(functional.multi_head_attention_forward)


@contextmanager
def _saying(module: nn.Module) -> Iterator[None]:
    """Name the module in errors of the body."""
    try:
        yield
    except Refused:
        raise
    except Exception as error:
        raise RuntimeError(
            f"{type(module).__name__}: failed when run once more: {type(error).__name__}: {error}"
        ) from error
