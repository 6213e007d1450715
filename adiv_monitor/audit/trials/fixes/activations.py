"""Fixes that replace activation functions, both modules and functions that a module calls."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from adiv_monitor.audit.seen.calls import Call, change_calls, see_calls
from adiv_monitor.audit.seen.outputs import WITH_THEIR_OWN, activated_output
from adiv_monitor.audit.seen.probes.no_activation import maps_that_run
from adiv_monitor.audit.training.batches import copied
from adiv_monitor.audit.training.setup import Fork
from adiv_monitor.audit.trials.fixes.fix import DoesNotApply, Fix
from adiv_monitor.audit.trials.fixes.places import modules_at
from adiv_monitor.diagnosis.record import Record

Functions = frozenset[Callable[..., Any]]

_IN_PLACE: Functions = frozenset(
    {
        *(functional.relu_, torch.relu_, Tensor.relu_),
        *(torch.sigmoid_, Tensor.sigmoid_, torch.tanh_, Tensor.tanh_, functional.hardtanh_),
    }
)
_RELUS: Functions = frozenset(
    {functional.relu, torch.relu, Tensor.relu, functional.relu_, torch.relu_, Tensor.relu_}
)
_SATURATING: Functions = frozenset(
    {
        *(torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_, functional.sigmoid),
        *(torch.tanh, torch.tanh_, Tensor.tanh, Tensor.tanh_, functional.tanh),
        *(functional.hardsigmoid, functional.hardtanh, functional.hardtanh_, functional.softsign),
    }
)


class _Replaced(TorchFunctionMode):
    """Replaces some functions by leaky ReLU in its context, and counts their calls."""

    def __init__(self, functions: Functions, slope: float) -> None:
        super().__init__()
        self._functions = functions
        self._slope = slope
        self.met = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self._functions:
            return func(*args, **kwargs)
        self.met += 1
        # The only boolean argument of these functions is `inplace`.
        in_place = func in _IN_PLACE or kwargs.get("inplace", any(x is True for x in args))
        return functional.leaky_relu(args[0] if args else kwargs["input"], self._slope, in_place)


def _replaced(
    functions: Functions, slope: float, fork: Fork, layers: Sequence[str], record: Record | None
) -> None:
    """Replace the functions wherever the named modules, or modules inside them, call one.

    If none of them does, replace them in the whole model. A ReLU is a leaky ReLU of slope 0.
    """
    if layers and _runs_within(
        functions, slope, fork, list(modules_at(fork.model, layers).values())
    ):
        return
    if not _runs_within(functions, slope, fork, [fork.model]):
        raise DoesNotApply("no such activation function runs here")


def _runs_within(
    functions: Functions, slope: float, fork: Fork, modules: Sequence[nn.Module]
) -> bool:
    """Wrap the modules; return whether a forward pass calls one of the functions."""
    replaced = _Replaced(functions, slope)
    for module in modules:
        module.forward = _within(replaced, module.forward)
    was_training = [module for module in fork.model.modules() if module.training]
    fork.model.eval()  # so that buffers, such as running statistics, stay
    with torch.no_grad():
        fork.loss(fork.model, copied(fork.batches[0]))
    for module in was_training:
        module.training = True
    return replaced.met > 0


def _within(replaced: _Replaced, forward: Callable[..., Any]) -> Callable[..., Any]:
    def replacing(*args: Any, **kwargs: Any) -> Any:
        with replaced:
            return forward(*args, **kwargs)

    return replacing


def _plain_outputs(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Remove the activation function whose outputs a loss takes for logits: a module, or a call."""
    output = activated_output(fork)
    if output is None:
        raise DoesNotApply("no activation function stands in front of the loss")
    module = None if output.module is None else fork.model.get_submodule(output.module)
    if module is not None and type(module).__module__.startswith("torch.nn.modules.activation"):
        module.forward = nn.Identity().forward
        return

    number = _number(fork, output.function)

    def change(call: Call) -> Any:
        return call.argument(0, "input") if call.number == number else NotImplemented

    change_calls(fork, change)


def _number(fork: Fork, function: str) -> int:
    """Return the number of the last call of a function whose own result the loss receives."""
    made: dict[int, tuple[int, Tensor]] = {}  # tensors are held so that their memory is not reused
    found: list[int] = []

    def look(call: Call) -> None:
        given = call.argument(0, "input")
        if call.name in WITH_THEIR_OWN and isinstance(given, Tensor):
            found.extend(n for n, _ in [made.get(given.untyped_storage().data_ptr(), (-1, given))])
        if call.name.rpartition("_")[2] == function and isinstance(call.result, Tensor):
            made[call.result.untyped_storage().data_ptr()] = call.number, call.result

    with torch.no_grad():
        see_calls(fork, look)
    if not found or found[-1] < 0:
        raise DoesNotApply(f"{function} is called in forward(), or in the loss")
    return found[-1]


def _relu_between(fork: Fork, layers: Sequence[str], record: Record | None) -> None:
    """Put a ReLU behind each linear or convolutional layer that runs, but the last."""
    before = maps_that_run(fork)[:-1]
    if not before:
        raise DoesNotApply("fewer than two layers run")
    for path in before:
        fork.model.get_submodule(path).register_forward_hook(
            lambda module, args, output: functional.relu(output)
        )


FIXES = [
    Fix("relu-between", "a ReLU between the layers", _relu_between, rescales=True),
    Fix("leaky-relu", "leaky ReLU in place of ReLU", partial(_replaced, _RELUS, 0.1)),
    Fix(
        "relu",
        "ReLU in place of activation functions that saturate",
        partial(_replaced, _SATURATING, 0.0),
        rescales=True,
    ),
    Fix("plain-outputs", "outputs without an activation function", _plain_outputs, rescales=True),
]
