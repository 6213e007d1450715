"""A module's forward as a function of its parameters: a copy of the module is run on the same data.

Nothing of the run is touched: what runs is a twin of the module, without its hooks, with copies of
its parameters, buffers and other state, on copies of the inputs.
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
from adiv_monitor.rerun.nested import tensors_in
from adiv_monitor.rerun.surroundings import Surroundings, untouched

T = TypeVar("T")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Through = Callable[[nn.Module, Callable[[], Any]], T]
"""(the copy that runs, what runs it) → what is wanted of that."""
# Of a module's hooks.
_TABLES = [name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict)]


class Twin:
    """One call of a module as a function of its parameters, with inputs and randomness held.

    Hooks are not run, but those of `torch.nn.utils` that make weights: where another one changes
    the output, that is not what it was. No other rank is waited for.

    Args:
        module: the module, whose forward runs or has just run.
        arguments: what the forward got, in copies that nobody else writes to.
        surroundings: what it found when it began.
        written: by id, what tensors of the module's were then that were written to since.
        own: by id, what stands for its trained parameters; copies are made of those that are not
            there, and kept there for other twins.
        cast: gives its other parameters, its buffers and other tensors in another precision.
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
        """What comes of the forward with these values of some parameters.

        Args:
            parameters: the values, by name in the module.
            through: makes the call.
        """
        return self._unseen(partial(self._call, through, parameters))

    def jvp(self, parameters: Parameters, tangents: Parameters, through: Through[T]) -> tuple[T, T]:
        """What comes of the forward, and how that moves with the parameters, to first order.

        By forward-mode derivatives, or where a function has none by those of its backward.

        Args:
            parameters: see `run`.
            tangents: the change of some of them.
            through: makes the call, which may be made twice; gives tensors in any structure.

        Raises:
            RuntimeError: a function has no derivatives.
        """
        return self._unseen(
            partial(self._either, partial(self._call, through), parameters, tangents)
        )

    @property
    def precision(self) -> float:
        """Rounding of the coarsest numbers that the forward computes with."""
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
            except RuntimeError:  # of which NotImplementedError is one
                self._has_forward_mode = False
        return jvp_by_gradients(function, parameters, tangents, self.precision)

    def _call(self, through: Through[T], parameters: Parameters) -> T:
        # The forward may change its inputs and its own state: both are as they were for the next.
        memo: dict[int, Any] = {id(p): p for p in self._copy.parameters()}
        module, (args, kwargs) = copy.deepcopy((self._copy, self._arguments), memo)
        call = partial(functional_call, module, dict(parameters), args, kwargs)
        with self._surroundings.again():
            return through(module, call)

    def _unseen(self, run: Callable[[], T]) -> T:
        """On paths that have derivatives, and waiting for nobody."""

        def derivable() -> T:
            around = ExitStack()
            try:
                with around:
                    self._stand_apart(around)
                    return run()
            finally:  # where an interrupt came before the end of the `with`
                around.close()

        return untouched((), self._surroundings.devices, derivable)

    def _stand_apart(self, stack: ExitStack) -> None:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        dist = torch.distributed
        if dist.is_available() and dist.is_initialized():
            stack.enter_context(_Alone())  # type: ignore[no-untyped-call]
        if self._recurrent:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            # Its `flags` would set more than they are asked to, with a warning.
            set_flags = torch.backends.mkldnn.set_flags
            stack.callback(set_flags, *set_flags(_enabled=False))  # type: ignore[no-untyped-call]


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets no function wait for other ranks, which may not run what this one does."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            raise RuntimeError(f"{func} would wait for the other ranks")
        return func(*args, **(kwargs or {}))


def _copy(
    module: nn.Module,
    written: Mapping[int, Tensor],
    own: dict[int, nn.Parameter],
    cast: Callable[[Tensor], Tensor],
) -> nn.Module:
    """The module without its hooks; see `Twin`."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        state = vars(part)
        for name in _TABLES:
            kept = [(key, hook) for key, hook in state[name].items() if _makes_weights(hook)]
            memo[id(state[name])] = OrderedDict(kept)
        for tensor in tensors_in(*state.values()):
            if not isinstance(tensor, nn.Parameter):  # torch copies no tensor with a graph
                memo[id(tensor)] = cast(written.get(id(tensor), tensor).detach().clone())
            elif tensor.requires_grad:
                if id(tensor) not in own:
                    own[id(tensor)] = _fixed(cast(tensor.detach().clone()))
                memo[id(tensor)] = own[id(tensor)]
            else:
                other = cast(tensor.detach())
                memo[id(tensor)] = tensor if other.dtype == tensor.dtype else _fixed(other)
    return copy.deepcopy(module, memo)


def _fixed(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


def _makes_weights(hook: object) -> bool:
    """Whether it is one of torch's own, of weight_norm or spectral_norm."""
    return type(hook).__module__.startswith("torch.nn.utils.")
