"""A module's forward as a function of its parameters: a copy of the module runs on the same data.

The training run is not affected: the copy has no hooks, has its own copies of the parameters,
buffers and other state, and runs on copies of the inputs.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from adiv_monitor.rerun.derivatives import Parameters, jvp, jvp_by_gradients
from adiv_monitor.rerun.kept import may_be_written
from adiv_monitor.rerun.nested import tensors_in
from adiv_monitor.rerun.surroundings import Surroundings, untouched

T = TypeVar("T")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Through = Callable[[nn.Module, Callable[[], Any]], T]
"""Function of (the copied module, a function that calls it) that returns the wanted result."""
# Names of the attributes that hold a module's hooks.
_TABLES = [name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict)]


class Twin:
    """One call of a module as a function of its parameters, with fixed inputs and randomness.

    Only those hooks of `torch.nn.utils` run that compute weights: if another hook changes the
    output, the twin's output differs. The twin does not communicate with other ranks.

    Args:
        module: the module, whose forward is running or has just run.
        arguments: copies of the forward's arguments, to which nobody else writes.
        surroundings: the state when the forward began.
        written: by id, the values at that time of tensors of the module that were written to since.
        own: by id, the stand-ins of its trained parameters; missing ones are copied, and kept there
            for other twins.
        cast: casts its untrained parameters, buffers and other tensors to another precision.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Arguments,
        surroundings: Surroundings,
        written: Mapping[int, Tensor],
        own: dict[int, nn.Parameter],
        cast: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self.module = module
        self._copy = _copy(module, written, own, cast)
        self._arguments = arguments
        self._surroundings = surroundings
        self._recurrent = any(isinstance(m, nn.RNNBase) for m in module.modules())
        self._has_forward_mode = True
        self.parameters = dict(self._copy.named_parameters())

    def run(self, parameters: Parameters, through: Through[T]) -> T:
        """Run the forward with these values of some parameters, and return the result.

        Args:
            parameters: the values, by name in the module.
            through: makes the call.
        """
        return self._unseen(partial(self._call, through, parameters))

    def jvp(self, parameters: Parameters, tangents: Parameters, through: Through[T]) -> tuple[T, T]:
        """Return the forward's result and its first-order change with the parameters.

        Uses forward-mode derivatives, or the derivative of backward where a function has none.

        Args:
            parameters: see `run`.
            tangents: the change of some of them.
            through: makes the call, perhaps twice; returns tensors in any structure.

        Raises:
            RuntimeError: a function has no derivatives.
        """
        return self._unseen(
            partial(self._either, partial(self._call, through), parameters, tangents)
        )

    @property
    def precision(self) -> float:
        """Rounding of the coarsest dtype that the forward computes in."""
        dtypes = {p.dtype for p in self.parameters.values() if p.is_floating_point()}
        if not dtypes <= {torch.float64}:
            dtypes |= self._surroundings.cast_to
        return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)

    def _either(
        self, function: Callable[[Parameters], T], parameters: Parameters, tangents: Parameters
    ) -> tuple[T, T]:
        if self._has_forward_mode:
            try:
                return jvp(function, parameters, tangents)
            except RuntimeError:  # NotImplementedError is a RuntimeError
                self._has_forward_mode = False
        return jvp_by_gradients(function, parameters, tangents, self.precision)

    def _call(self, through: Through[T], parameters: Parameters) -> T:
        # The forward may change its inputs and its state: each call gets copies of both.
        memo: dict[int, Any] = {id(p): p for p in self._copy.parameters()}
        module, (args, kwargs) = copy.deepcopy((self._copy, self._arguments), memo)
        call = partial(functional_call, module, dict(parameters), args, kwargs)
        with self._surroundings.again():
            return through(module, call)

    def _unseen(self, run: Callable[[], T]) -> T:
        """Run a function unseen, on kernels that have derivatives and without communication."""

        def derivable() -> T:
            around = ExitStack()
            try:
                with around:
                    self._stand_apart(around)
                    return run()
            finally:  # in case of an interrupt before the end of the `with`
                around.close()

        copied = [*self.module.modules()]
        return untouched((), self._surroundings.devices, derivable, copied=copied)

    def _stand_apart(self, stack: ExitStack) -> None:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized():
            stack.enter_context(Alone())  # type: ignore[no-untyped-call]
        if self._recurrent:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            # `mkldnn.flags` would also set other flags, with a warning.
            set_flags = torch.backends.mkldnn.set_flags
            stack.callback(set_flags, *set_flags(_enabled=False))  # type: ignore[no-untyped-call]


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


def _copy(
    module: nn.Module,
    written: Mapping[int, Tensor],
    own: dict[int, nn.Parameter],
    cast: Callable[[Tensor], Tensor],
) -> nn.Module:
    """Copy the module without its hooks; see `Twin`."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        state = vars(part)
        for name in _TABLES:
            kept = [(key, hook) for key, hook in state[name].items() if _makes_weights(hook)]
            memo[id(state[name])] = OrderedDict(kept)
        for tensor in tensors_in(*state.values()):
            if not isinstance(tensor, nn.Parameter):  # deepcopy refuses tensors with a graph
                memo[id(tensor)] = cast(written.get(id(tensor), tensor).detach().clone())
            elif tensor.requires_grad:
                if id(tensor) not in own:
                    own[id(tensor)] = _fixed(cast(tensor.detach().clone()))
                memo[id(tensor)] = own[id(tensor)]
            else:
                other = cast(tensor.detach())
                if other.dtype != tensor.dtype:
                    memo[id(tensor)] = _fixed(other)
                else:
                    memo[id(tensor)] = _fixed(other.clone()) if may_be_written(tensor) else tensor
    return copy.deepcopy(module, memo)


def _fixed(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def _makes_weights(hook: object) -> bool:
    """Whether the hook is torch's own, of weight_norm or spectral_norm."""
    return type(hook).__module__.startswith("torch.nn.utils.")
