"""A module's forward as a function of its parameters: it runs again in place, on the same data."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from adiv_monitor.rerun.derivatives import pusher
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.surroundings import Surroundings, untouched

T = TypeVar("T")
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# Names of the attributes that hold a module's hooks.
_TABLES = [name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict)]


class Twin:
    """One call of a module as a function of its parameters, with fixed inputs and randomness.

    Only those hooks of `torch.nn.utils` run that compute weights: if another hook changes the
    output, the twin's output differs. The twin does not communicate with other ranks.

    Args:
        module: the module, whose forward is running or has just run.
        arguments: copies of the forward's arguments, to which nobody else writes.
        random: the state of the random numbers when the forward began.
        own: by id, the copies of its trained parameters; missing ones are made, and kept there for
            other twins.

    Attributes:
        parameters: these copies, by name.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Arguments,
        random: Randomness,
        own: dict[int, Tensor],
    ) -> None:
        self._module, self._arguments = module, arguments
        self._modules = list(module.modules())
        self._surroundings = Surroundings(random, self._modules)
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        for p in trained.values():
            if id(p) not in own:
                own[id(p)] = p.detach().clone()
        self.parameters: dict[str, Tensor] = {n: own[id(p)] for n, p in trained.items()}
        self._data = {p: own[id(p)] for p in trained.values()}  # what RNNs list

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
        leaves = {name: self.parameters[name].detach().requires_grad_() for name in tangents}

        def call() -> tuple[Tensor, Tensor]:
            # The forward may change its inputs: each call gets copies.
            args, kwargs = tree_map(_copied, self._arguments)
            # Hooks of the run on saved tensors, such as checkpointing's, must not see them.
            seen = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
            with torch._C.DisableTorchFunction(), seen:
                given = {**self.parameters, **leaves}
                made = pick(functional_call(self._module, given, args, kwargs))
                precision = max(self.precision, torch.finfo(made.dtype).eps)
                [move] = pusher([made], [*leaves.values()], precision)([*tangents.values()])
            return made.detach(), move

        return untouched(
            self._modules, self._surroundings, lambda: self._derivable(call), self._data
        )

    @property
    def precision(self) -> float:
        """Rounding of the coarsest dtype that the forward computes in."""
        dtypes = {p.dtype for p in self.parameters.values() if p.is_floating_point()}
        if not dtypes <= {torch.float64}:
            dtypes |= self._surroundings.cast_to
        return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)

    def _derivable(self, run: Callable[[], T]) -> T:
        """Run a function on kernels that have derivatives, without hooks and communication."""
        for part in self._modules:
            for name in _TABLES:
                hooks = vars(part).get(name, {}).items()
                kept = [(key, hook) for key, hook in hooks if _makes_weights(hook)]
                vars(part)[name] = OrderedDict(kept)
                if kept:
                    part.training = False  # spectral_norm has taken its step
            if isinstance(part, ParametrizationList):
                part.eval()
        with sdpa_kernel(SDPBackend.MATH), alone():
            return run()


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _makes_weights(hook: object) -> bool:
    """Whether the hook is torch's own, of weight_norm or spectral_norm."""
    return type(hook).__module__.startswith("torch.nn.utils.")


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
