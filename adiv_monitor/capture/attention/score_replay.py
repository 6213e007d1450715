"""An attention module run once more on some of its samples, up to its scores.

What lies between the projections and the scores differs from library to library: views, packed
weights, rotary positions, QK-norm, low-rank updates. So nothing is assumed of it: forward-mode
derivatives carry a change of the module's parameters through the module's own forward pass to the
queries and keys that reach `F.scaled_dot_product_attention`, and there the run ends. The inputs of
the module are held, as everywhere (*single-layer*), and all of its parameters move: those of values
and outputs do nothing to the scores.
"""

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from adiv_monitor.capture.again.randomness import Randomness
from adiv_monitor.capture.again.replay import twin_of
from adiv_monitor.capture.eager import forced_eager
from adiv_monitor.capture.forwards import without_overrides
from adiv_monitor.capture.weights.tape import tensors_in
from adiv_monitor.features import uses
from adiv_monitor.features.registry import Rule, find_rule, use_of
from adiv_monitor.features.rows import Rows, exact, precise
from adiv_monitor.features.scores import Attention, Move, attention, by_head, of_heads

Parameters = Mapping[str, Tensor]
"""By their names in the module."""


@dataclass(frozen=True)
class AttentionModule:
    """A module that holds projections and calls attention, and what to run it with.

    Attributes:
        module: itself.
        args: its inputs, on the samples that are looked at.
        kwargs: see args.
        parameters: values to run with of the trained ones, those before the step; the others are
            the module's own.
        calls: how often it calls attention until the run may end.
        written: by id, what its buffers were when the forward began that is to be repeated, if
            other than now.
        samples: which of the queries' samples are looked at, (chosen,) int64; None: all.
    """

    module: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    parameters: Parameters
    calls: int = 1
    written: Mapping[int, Tensor] = field(default_factory=dict)
    samples: Tensor | None = None


class Use(NamedTuple):
    """One use of trained parameters, in a run that records gradients.

    Attributes:
        z: its output.
        scale: ‖φ_r‖² of its rows, of what is trained.
        layout: (tensor shaped like the output) → rows in front, in the last dimension the channels,
            group by group.
    """

    z: Tensor
    scale: Float[Tensor, "rows groups"]
    layout: Callable[[Tensor], Tensor] = uses.as_it_is


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
                key: _dual(precise(value.detach()), direction.get(key))
                for key, value in attends.parameters.items()
            }
            reached = _run(attends, duals, _AttentionCalls(attends.calls)).arguments
            if not found:
                found = [(_plain(arguments, attends.samples), {}) for arguments in reached]
            for (_, moves), arguments in zip(found, reached, strict=True):
                dq, dk = _move(**arguments)
                if attends.samples is not None:
                    dq, dk = (moved.index_select(0, attends.samples) for moved in (dq, dk))
                moves[name] = dq, dk
    return found


def scores_with_graph(attends: AttentionModule) -> tuple[list[Reached], Parameters]:
    """Every attention call of the module, on all samples, with the graph that leads to it.

    The uses of parameters before it are those that the function rules know.

    Args:
        attends: the module.

    Returns:
        The calls, and the leaves of the graph, by name.

    Raises:
        RuntimeError: the module calls attention less often than it should.
    """
    leaves = {n: precise(p).detach().requires_grad_() for n, p in attends.parameters.items()}
    with torch.enable_grad():
        run = _run(attends, leaves, _AttentionCalls(attends.calls, notes_uses=True))
        calls = []
        for arguments, before in zip(run.arguments, run.uses_before, strict=True):
            query, key = _of_equal_shape(arguments["query"], arguments["key"])
            calls.append(Reached(query, key, run.uses[:before]))
    return calls, leaves


@cache
def _load_forward_mode() -> None:
    """Some of torch's forward derivatives are loaded with the first one; one file warns then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import torch._decomp.decompositions_for_jvp  # noqa: F401


def _move(query: Tensor, key: Tensor, **_: Any) -> Move:
    return _of_equal_shape(*(exact(_parts(dual)[1]) for dual in (query, key)))


def _of_equal_shape(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Both by sample and head, with as many of the one as of the other."""
    query = by_head(query)
    return query, of_heads(by_head(key), query.shape[1]).expand(len(query), -1, -1, -1)


def _dual(value: Tensor, tangent: Tensor | None) -> Tensor:
    if tangent is None:
        return value
    dual: Tensor = forward_ad.make_dual(value, tangent.to(value))  # type: ignore[no-untyped-call]
    return dual


def _parts(dual: Tensor) -> tuple[Tensor, Tensor]:
    """Value and tangent."""
    value, tangent = forward_ad.unpack_dual(dual)  # type: ignore[no-untyped-call]
    return value, torch.zeros_like(value) if tangent is None else tangent


def _plain(arguments: Mapping[str, Any], samples: Tensor | None) -> Attention:
    values: dict[str, Any] = {
        name: _parts(value)[0] if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
    return attention(**values, samples=samples)


class _ScoresReached(Exception):
    """Nothing that follows in the module is of interest."""


class _AttentionCalls(TorchFunctionMode):
    """Notes the arguments of the first so many attention calls, and ends the run with the last."""

    def __init__(self, calls: int, *, notes_uses: bool = False) -> None:
        super().__init__()
        self.arguments: list[dict[str, Any]] = []
        self.uses: list[Use] = []
        self.uses_before: list[int] = []  # each of the calls
        self.state: Collection[int] = ()  # ids of all parameters and buffers that the run uses
        self._calls = calls
        self._notes_uses = notes_uses
        self._inside = 0  # how many modules with rules of their own

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
        self.arguments.append({**dict(zip(ARGUMENTS, args, strict=False)), **kwargs})
        self.uses_before.append(len(self.uses))
        if len(self.arguments) == self._calls:
            raise _ScoresReached
        with sdpa_kernel(SDPBackend.MATH):  # the one that has a forward-mode derivative
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
        """The output, once its uses are noted; what is done to it in place is no part of them."""
        count = len(self.uses)
        self.uses += [use for each in found if (use := _with_scale(each, z)) is not None]
        with torch.enable_grad():
            return z.clone() if len(self.uses) > count else z

    @contextmanager
    def by_rules(self, module: nn.Module) -> Iterator[None]:
        """Modules that have rules of their own are uses as a whole."""
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
        return not isinstance(value, Tensor) or id(value) in self.state or id(base) in self.state


def _is_trained(tensor: Tensor | None) -> bool:
    """Whether it is a parameter that moves, or a view of one: the inputs have no gradient."""
    if tensor is None or not tensor.requires_grad:
        return False
    return tensor.is_leaf or (tensor._base is not None and tensor._base.is_leaf)


def _with_scale(use: uses.Use, z: Tensor) -> Use | None:
    weight, bias = _is_trained(use.weight), _is_trained(use.bias)
    if not weight and not bias:
        return None
    every = Rows(tuple(use.layout(z).shape[:-1]), None, z.device)
    scale = use.features(every).restrict(weight=weight, bias=bias).scale()
    return None if scale is None else Use(z, scale, use.layout)


ARGUMENTS = tuple(inspect.signature(attention).parameters)
_SIGNATURE = inspect.signature(functional.multi_head_attention_forward)
_opened = without_overrides(functional.multi_head_attention_forward)


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets no function wait for other processes, which may not run what this one does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(f"{func} would wait for the other processes")
        return func(*args, **(kwargs or {}))


def _run(
    attends: AttentionModule, parameters: Parameters, noting: _AttentionCalls
) -> _AttentionCalls:
    """Run a twin of the module, in the precision of the measures, as if nobody had."""
    kwargs = dict(attends.kwargs)
    if isinstance(attends.module, nn.MultiheadAttention):  # else scores are made where none looks
        kwargs["need_weights"] = False
    device = next(iter(parameters.values())).device
    around = ExitStack()
    try:
        own = {id(parameter): parameter for parameter in attends.module.parameters()}
        twin = twin_of(attends.module, own, attends.written)
        state = {name: precise(p.detach()) for name, p in twin.named_parameters()}
        state |= {**{name: precise(b) for name, b in twin.named_buffers()}, **parameters}
        noting.state = {id(tensor) for tensor in state.values()}
        with around:
            eager = forced_eager()
            around.callback(eager.leave)  # where its end is interrupted
            for each in (suppress(_ScoresReached), eager, Randomness([device]).again()):
                around.enter_context(each)
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                around.enter_context(_Alone())  # type: ignore[no-untyped-call]
            around.enter_context(noting.by_rules(twin))
            around.enter_context(noting)
            functional_call(twin, state, tuple(attends.args), kwargs)
    except Exception as error:
        raise RuntimeError(
            f"{type(attends.module).__name__}: failed when run once more: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:  # where an interrupt came before the end of the `with`
        around.close()
    if len(noting.arguments) < attends.calls:
        raise RuntimeError(
            f"{type(attends.module).__name__}: got {len(noting.arguments)} calls of "
            f"F.scaled_dot_product_attention when run once more, expected {attends.calls}"
        )
    return noting
