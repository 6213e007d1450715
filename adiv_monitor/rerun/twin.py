"""A module's forward as a function of its parameters: it runs again in place, on the same data."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from adiv_monitor.rerun.derivatives import pusher
from adiv_monitor.rerun.surroundings import Randomness, Surroundings, untouched

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# Names of the attributes that hold a module's hooks.
_TABLES = [name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict)]


class Twin:
    """One call of a module as a function of its parameters, with fixed inputs and randomness.

    Only those hooks of `torch.nn.utils` run that compute weights: if another hook changes the
    output, the twin's output differs. The twin does not communicate with other ranks.

    Args:
        module: the module, whose forward is running or has just run.
        arguments: the forward's arguments, of which it keeps copies.
        random: the state of the random numbers when the forward began.
    """

    def __init__(self, module: nn.Module, arguments: Arguments, random: Randomness) -> None:
        self._module, self._arguments = module, tree_map(_copied, arguments)
        self._modules = list(module.modules())
        self._surroundings = Surroundings(random, self._modules)
        trained = (p for p in module.parameters() if p.requires_grad)
        self._before = {p: p.detach().clone() for p in trained}

    def jvp(
        self, tangents: Mapping[str, Tensor], pick: Callable[[Any], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return a tensor of the forward's result, and its first-order change with the parameters.

        Args:
            tangents: the change of some parameters.
            pick: picks the tensor of the output.

        Raises:
            RuntimeError: the backward pass of a function has no derivative.
        """
        moving = {name: self._before[self._module.get_parameter(name)] for name in tangents}
        leaves = {name: p.detach().requires_grad_() for name, p in moving.items()}

        def call() -> tuple[Tensor, Tensor]:
            self._leave_forwards_alone()
            # The forward may change its inputs: each call gets copies.
            args, kwargs = tree_map(_copied, self._arguments)
            with torch._C.DisableTorchFunction(), sdpa_kernel(SDPBackend.MATH), alone():
                made = pick(functional_call(self._module, leaves, args, kwargs))
                precision = max(self.precision, torch.finfo(made.dtype).eps)
                [move] = pusher([made], [*leaves.values()], precision)([*tangents.values()])
            return made.detach(), move

        return untouched(self._modules, self._surroundings, call, self._before)

    @property
    def precision(self) -> float:
        """Rounding of the coarsest dtype that the forward computes in."""
        dtypes = {p.dtype for p in self._before.values()}
        if not dtypes <= {torch.float64}:
            dtypes |= self._surroundings.cast_to
        return max(torch.finfo(dtype).eps for dtype in dtypes)

    def _leave_forwards_alone(self) -> None:
        """Take off all hooks but those that make weights, which make them as in evaluation."""
        for part in self._modules:
            for name in _TABLES:
                every = vars(part).get(name, {}).items()  # those of weight_norm are kept
                kept = [x for x in every if type(x[1]).__module__.startswith("torch.nn.utils.")]
                vars(part)[name] = OrderedDict(kept)
                if kept:
                    part.training = False  # spectral_norm has taken its step
            if isinstance(part, ParametrizationList):
                part.eval()


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


class Waits(RuntimeError):
    """Raised at a collective, which other ranks may not be running."""


class Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that raises at collectives: the other ranks may not be running this call."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise Waits(f"{func} would wait for the other ranks")
        return func(*args, **(kwargs or {}))


def alone() -> AbstractContextManager[object]:
    """Return a context that raises at collectives, if there are other ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return Alone()  # type: ignore[no-untyped-call]
    return nullcontext()
