"""A module's forward, run again apart from the training run, with a tangent on its parameters.

Nothing of the run is touched: what runs is a twin of the module, without its hooks, with copies of
its parameters, buffers and other state, on copies of the inputs; the generators are put back.
"""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from adiv_monitor.capture.again.outputs import Outputs
from adiv_monitor.capture.eager import forced_eager
from adiv_monitor.capture.forwards import Forward
from adiv_monitor.capture.weights.tape import tensors_in
from adiv_monitor.features.rows import exact

# Of a module's hooks.
_TABLES = [name for name, value in vars(nn.Module()).items() if isinstance(value, OrderedDict)]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Replay:
    """z and J_Θ(z) ΔΘ of one call of a module, inputs held, for changes of some parameters.

    By forward-mode derivatives, for which no_grad hides nothing; where a function has none, by
    differentiating its backward twice, which then says what a move is, for custom functions too.
    Hooks are not run, but those of `torch.nn.utils` that make weights: where another one changes
    the output, z is not what it was.

    Args:
        module: the module, whose forward has just run.
        names: of the parameters that move.
        arguments: what the forward got.
        outputs: which tensors of what it gave are z.
        began: what it found when it began.
        before: by id, the copies of parameters that were made already: the twins share them.
        elements: elements of the batch to run, an index (n,); None: all. Tensors whose first
            dimension is as long as `batch` are cut.
        batch: elements of the whole batch.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        arguments: Arguments,
        outputs: Outputs,
        began: Forward,
        before: dict[int, nn.Parameter],
        *,
        elements: Tensor | None,
        batch: int,
    ) -> None:
        def held(tensor: Tensor) -> Tensor:
            if elements is None or not tensor.dim() or len(tensor) != batch:
                return tensor.detach().clone()
            return tensor.detach().index_select(0, elements.to(tensor.device))

        args, kwargs = arguments
        self._args = [_copied(arg, held) for arg in args]
        self._kwargs = {name: _copied(arg, held) for name, arg in kwargs.items()}
        self._twin = twin_of(module, before, began.written)
        parameters = dict(self._twin.named_parameters())
        self._moving = {name: parameters[name] for name in names}
        self._outputs = outputs
        self._random = began.random
        self._recurrent = any(isinstance(m, nn.RNNBase) for m in module.modules())
        kinds = {device.type for _, _, device in outputs.like}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        ]
        self._has_forward_mode = True
        _load_derivatives()

    @property
    def precision(self) -> float:
        """Rounding of the coarsest numbers that the forward computes with."""
        dtypes = {dtype for _, dtype, _ in self._outputs.like}
        dtypes |= {p.dtype for p in self._twin.parameters() if p.is_floating_point()}
        if not dtypes <= {torch.float64}:
            dtypes |= {dtype for _, dtype, enabled in self._autocast if enabled}
        return max(torch.finfo(dtype).eps for dtype in dtypes)

    def run(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """What z is, and J_Θ(z) ΔΘ, laid out as rows, for a change of the parameters.

        Args:
            vector: ΔΘ, one parameter after the other, (P,).
        """
        unit = vector.abs().amax()  # half precision has no numbers as small as changes may be
        unit = torch.where(unit == 0, 1, unit)
        sizes = [p.numel() for p in self._moving.values()]
        parts = torch.split(vector / unit, sizes)
        tangents = [
            part.view_as(p).to(p) for part, p in zip(parts, self._moving.values(), strict=True)
        ]
        around = ExitStack()
        try:
            with around:
                self._stand_apart(around)
                z, moved = self._either(tangents)
                return exact(self._outputs.rows(z)), exact(self._outputs.rows(moved)) * unit
        finally:  # where an interrupt came before the end of the `with`
            around.close()

    def _either(self, tangents: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        if self._has_forward_mode:
            try:
                return self._forward_mode(tangents)
            except RuntimeError:  # of which NotImplementedError is one
                self._has_forward_mode = False
        return self._backward_twice(tangents)

    def _forward_mode(self, tangents: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        with torch.no_grad(), forward_ad.dual_level():
            duals = [
                forward_ad.make_dual(p.detach(), tangent)  # type: ignore[no-untyped-call]
                for p, tangent in zip(self._moving.values(), tangents, strict=True)
            ]
            pairs = [
                forward_ad.unpack_dual(z)  # type: ignore[no-untyped-call]
                for z in self._call(duals)
            ]
            moved = [torch.zeros_like(z) if t is None else t for z, t in pairs]
            return [z for z, _ in pairs], moved

    def _backward_twice(self, tangents: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """J is what ⟨Jᵀv, tangent⟩, linear in v, has as its derivative by v."""
        # Those hooks of the run, such as checkpointing's, must not see what is saved here.
        unseen = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with torch.enable_grad(), unseen:
            moving = [p.detach().requires_grad_() for p in self._moving.values()]
            z = self._call(moving)
            reached = [x for x in z if x.requires_grad]
            v = [pattern(x).requires_grad_() for x in reached]
            products = torch.autograd.grad(reached, moving, v, create_graph=True, allow_unused=True)
            used = [(p, t) for p, t in zip(products, tangents, strict=True) if p is not None]
            if not used:
                return [x.detach() for x in z], [torch.zeros_like(x) for x in z]
            terms = [(product * tangent).sum() for product, tangent in used]
            moves = torch.autograd.grad(terms, v, allow_unused=True, materialize_grads=True)
        # What is linear in v is its derivative times v.
        whole = _sums(*zip(*used, strict=True))
        again = _sums(moves, v)
        if (whole[0] - again[0]).abs() > tolerance(self.precision) * (whole[1] + again[1]):
            raise RuntimeError("a custom backward inside can't be differentiated itself")
        found = dict(zip(map(id, reached), moves, strict=True))
        return [x.detach() for x in z], [found.get(id(x), torch.zeros_like(x)) for x in z]

    def _call(self, moving: Sequence[Tensor]) -> list[Tensor]:
        # The forward may change its inputs and its own state: both are as they were for the next.
        memo: dict[int, Any] = {id(p): p for p in self._twin.parameters()}
        twin, args, kwargs = copy.deepcopy((self._twin, self._args, self._kwargs), memo)
        changed = dict(zip(self._moving, moving, strict=True))
        return self._outputs.of(functional_call(twin, changed, tuple(args), kwargs))

    def _stand_apart(self, stack: ExitStack) -> None:
        """Unseen by modes of torch functions and compilers, on paths that have derivatives."""
        stack.enter_context(torch._C.DisableTorchFunction())
        eager = forced_eager()
        stack.callback(eager.leave)  # where its end is interrupted
        stack.enter_context(eager)
        stack.enter_context(self._random.again())
        for kind, dtype, enabled in self._autocast:
            stack.enter_context(torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if self._recurrent:
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
            # Its `flags` would set more than they are asked to, with a warning.
            set_flags = torch.backends.mkldnn.set_flags
            stack.callback(set_flags, *set_flags(_enabled=False))  # type: ignore[no-untyped-call]


def tolerance(precision: float) -> float:
    """What rounding may do: matrix products of float32 may be taken in TensorFloat-32."""
    return 1e-9 if precision < 1e-15 else max(1e-3, 4 * precision)


def _sums(a: Iterable[Tensor], b: Iterable[Tensor]) -> Tensor:
    """⟨a, b⟩, and the sum of the terms' sizes."""
    terms = [exact(x.detach()) * exact(y.detach()) for x, y in zip(a, b, strict=True)]
    return torch.stack([torch.stack((t.sum(), t.abs().sum())) for t in terms]).sum(0)


def pattern(like: Tensor) -> Tensor:
    """Numbers of which none is zero."""
    numbers = torch.linspace(0.5, 1.5, like.numel(), dtype=like.dtype, device=like.device)
    return numbers.view(like.shape)


@cache
def _load_derivatives() -> None:
    """Torch loads some forward-mode derivatives when one is first taken, and may warn of that."""
    with warnings.catch_warnings(), forward_ad.dual_level():
        warnings.simplefilter("ignore")
        forward_ad.make_dual(torch.zeros(1), torch.zeros(1))  # type: ignore[no-untyped-call]


def _copied(value: Any, held: Callable[[Tensor], Tensor]) -> Any:
    """A copy of an argument, with what is held in place of its tensors."""
    if isinstance(value, Tensor):
        return held(value)
    if isinstance(value, list | tuple):
        items = [_copied(item, held) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is dict:
        return {key: _copied(item, held) for key, item in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise TypeError(
            f"its forward got a {type(value).__name__}, of which no copy can be made"
        ) from error


def twin_of(
    module: nn.Module, before: dict[int, nn.Parameter], written: Mapping[int, Tensor]
) -> nn.Module:
    """A copy of a module without its hooks; trained parameters are those of `before`.

    Tensors that the forward has written to are what they were.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        state = vars(part)
        for name in _TABLES:
            kept = [(key, hook) for key, hook in state[name].items() if _makes_weights(hook)]
            memo[id(state[name])] = OrderedDict(kept)
        for tensor in tensors_in(*state.values()):
            if not isinstance(tensor, nn.Parameter):  # torch copies no tensor with a graph
                memo[id(tensor)] = written.get(id(tensor), tensor).detach().clone()
            elif tensor.requires_grad:
                memo[id(tensor)] = before.setdefault(id(tensor), _fixed(tensor))
            else:
                memo[id(tensor)] = tensor
    return copy.deepcopy(module, memo)


def _fixed(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), requires_grad=False)


def _makes_weights(hook: object) -> bool:
    """Whether it is one of torch's own, of weight_norm or spectral_norm."""
    return type(hook).__module__.startswith("torch.nn.utils.")
