"""The probe's batch: samples of the first forward pass of the first measured step."""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from adiv_monitor.capture.guard import call_all
from adiv_monitor.capture.hook import Hook, ModuleHook, trains
from adiv_monitor.capture.loss_hook import LossOf
from adiv_monitor.capture.selection import is_wrapper
from adiv_monitor.features.rows import to_compute_dtype
from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.randomness import Randomness
from adiv_monitor.rerun.surroundings import Surroundings, devices_of, reruns, version
from adiv_monitor.rerun.thread import ThreadState, run_apart

SAMPLES = 8
# Arguments of these types do not hold tensors that have to be cut, too.
_PLAIN = (
    *(bool, int, float, complex, str, bytes, slice, range),
    *(torch.dtype, torch.device, nn.Module),
)


class _Form(NamedTuple):
    """How a tensor lies in memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, x: Tensor) -> "_Form":
        return cls(x.shape, x.stride(), int(x.storage_offset()))


class _View(NamedTuple):
    """A placeholder for an argument of the loss that is an output of the model, or its view.

    Attributes:
        number: of the output.
        of: the output.
        seen: the argument.
    """

    number: int
    of: _Form
    seen: _Form

    def again(self, outputs: list[Tensor], samples: int | None) -> Tensor:
        """Return the view of the output of another call, perhaps on fewer samples."""
        base = outputs[self.number] if self.number < len(outputs) else None
        kept = 0 if samples is None else 1
        is_same = self.of == self.seen
        if (
            base is None
            or base.shape[kept:] != self.of.shape[kept:]
            or not (is_same or base.stride() == self.of.stride)
        ):
            raise Refused("the model returns tensors of other shapes or strides when it runs again")
        if is_same:
            return base
        shape = (*([samples] * kept), *self.seen.shape[kept:])
        offset = int(base.storage_offset()) + self.seen.offset - self.of.offset
        return base.as_strided(shape, self.seen.stride, offset)


class _Call:
    """The arguments of one call, not copied.

    Args:
        args: the positional arguments.
        kwargs: the named arguments.
        outputs: outputs of the model, with their versions.

    Attributes:
        leaves: the leaves of these; tensors without their graph.
        computed: whether something else than the model's outputs was computed with a graph.
    """

    def __init__(self, args: Any, kwargs: Any, outputs: Sequence[tuple[Tensor, int]] = ()) -> None:
        given, self._structure = tree_flatten((args, kwargs))
        self.leaves = [_placed(x, outputs) for x in given]
        self._versions = [version(x) if isinstance(x, Tensor) else 0 for x in self.leaves]
        pairs = zip(given, self.leaves, strict=True)
        self.computed = any(isinstance(held, Tensor) and x.grad_fn is not None for x, held in pairs)

    def sizes(self) -> set[int]:
        """Return the sizes of dimension 0 of all tensors; −1 for what may hold others."""
        found = set[int]()
        for x in self.leaves:
            if isinstance(x, _View) or (isinstance(x, Tensor) and x.layout is torch.strided):
                found.update((x.seen if isinstance(x, _View) else x).shape[:1])
            elif not (x is None or isinstance(x, _PLAIN)):
                found.add(-1)
        return found

    def cut(self, samples: int | None) -> tuple[list[Any], Any]:
        """Return copies of the arguments on the first samples, and their structure.

        Raises:
            Refused: one of them was changed since.
        """
        pairs = zip(self.leaves, self._versions, strict=True)
        if any(isinstance(x, Tensor) and version(x) != then for x, then in pairs):
            raise Refused("the model, or the loop, changes an input in place")
        return [_cut(x, samples) for x in self.leaves], self._structure


@dataclass(frozen=True, eq=False)
class Losses:
    """The loss of the probe.

    Attributes:
        whole: one number, with its graph: the loss of all samples, or their mean.
        samples: (samples,); None if only `whole` is known.
    """

    whole: Tensor
    samples: Tensor | None

    @classmethod
    def of(cls, value: Any, samples: Tensor | None = None) -> "Losses":
        """Return the loss from its value: one number, or one for every sample (B, …).

        Raises:
            TypeError: the value is not a tensor.
        """
        if not isinstance(value, Tensor):
            raise TypeError(f"the loss is a {type(value).__name__}, expected a tensor")
        each = to_compute_dtype((value if samples is None else samples).detach())
        each = each.flatten(1).mean(1) if each.dim() > 1 else each
        return cls(to_compute_dtype(value).mean(), each if each.dim() else None)


@dataclass(frozen=True, eq=False)
class Batch:
    """The probe.

    Attributes:
        module: the module that is called: the model, the first part of it that was, or the loss
            that calls the model.
        surroundings: autocast's settings and random numbers of that call.
        loss: the loss; None: there is none.
        why_no_loss: why the loss is not known; "" if it is.
    """

    module: nn.Module
    surroundings: Surroundings
    loss: LossOf | None
    why_no_loss: str
    _samples: int | None
    _call: tuple[list[Any], Any]
    _judged: tuple[list[Any], Any] | None

    def run(self) -> Losses | None:
        """Call the module, and return the loss, if it is known."""
        args, kwargs = tree_unflatten([_cut(x) for x in self._call[0]], self._call[1])
        output = self.module(*args, **kwargs)
        if self.module is self.loss:
            return Losses.of(output)
        if self.loss is None or self.why_no_loss:
            return None
        if not isinstance(self.loss, nn.Module):
            return Losses.of(self.loss(output))
        assert self._judged is not None
        given, outputs = self._judged[0], _tensors_of(output)
        leaves = [
            x.again(outputs, self._samples) if isinstance(x, _View) else _cut(x) for x in given
        ]
        args, kwargs = tree_unflatten(leaves, self._judged[1])
        return Losses.of(self.loss(*args, **kwargs), _of_samples(self.loss, args, kwargs))


class FirstPass:
    """Records the first forward pass with gradients, and the arguments of its loss.

    Args:
        modules: the modules that hold the measured parameters, at any depth.
        every: all modules of the model and of the loss.
        loss: the loss; None: there is none.
        fail: called with the exception if recording fails.
    """

    def __init__(
        self,
        modules: Collection[nn.Module],
        every: Collection[nn.Module],
        loss: LossOf | None,
        fail: Callable[[Exception], None],
    ) -> None:
        self._every, self._loss, self._fail = every, loss, fail
        self._call: tuple[nn.Module, Surroundings, _Call] | None = None
        self._outputs: list[tuple[Tensor, int]] | None = None  # None: the module has not returned
        self._around: tuple[Any, ...] | None = None  # the arguments of the loss, while it runs
        self._judged: _Call | None = None
        self._computed = False
        begins, ends, judges = (
            Hook(self._guarded, body) for body in (self._begins, self._ends, self._judges)
        )
        within = [module for module in modules if not is_wrapper(module)]
        self._hooks = [ModuleHook(module, begins, before=True) for module in within]
        self._hooks += [ModuleHook(module, ends, before=False) for module in within]
        if isinstance(loss, nn.Module):
            self._hooks.append(ModuleHook(loss, judges, before=True))
            self._hooks.append(ModuleHook(loss, ends, before=False))

    def put_on(self) -> None:
        """Register the hooks. `remove` removes them, even if this method raises."""
        for hook in self._hooks:
            hook.put_on()

    def remove(self) -> None:
        """Remove the hooks."""
        call_all(*(hook.remove for hook in self._hooks))

    def batch(self) -> Batch:
        """Return the probe.

        Raises:
            Refused: no forward pass was seen, or its inputs were changed since.
        """
        if self._call is None or self._outputs is None:
            raise Refused("no forward pass of the model was seen")
        module, surroundings, call = self._call
        sizes = call.sizes() | (set() if self._judged is None else self._judged.sizes())
        samples = SAMPLES if len(sizes) == 1 and min(sizes) > SAMPLES else None
        told = None if self._judged is None else self._judged.cut(samples)
        given = module, surroundings, self._loss, self._why_no_loss(), samples
        return Batch(*given, call.cut(samples), told)

    def _why_no_loss(self) -> str:
        calls = self._call is not None and self._call[0] is self._loss
        if calls or not isinstance(self._loss, nn.Module) or self._judged is not None:
            return ""
        kind = type(self._loss).__name__
        if self._computed:
            return (
                f"an input of {kind} was computed, outside of the module that was called, from "
                "its output; move that code into a module"
            )
        return (
            f"{kind} was not seen to be called with the model's output (is it another instance "
            "than the loop's, or called inside of the model?); a function of the output is an "
            "alternative"
        )

    def _begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._call is None and trains(args) and torch._C._current_graph_task_id() == -1:
            if self._around is not None:  # the loss calls the model
                module, args, kwargs = self._around
            call = _Call(args, kwargs)
            if 0 not in call.sizes():  # a micro-batch may have no samples
                random = Randomness(devices_of(self._every), others=True)
                self._call = module, Surroundings(random), call

    def _ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module is self._loss:
            self._around = None
        if self._call is not None and module is self._call[0] and self._outputs is None:
            self._outputs = [(x.detach(), version(x)) for x in _tensors_of(output)]

    def _judges(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._around = module, args, kwargs
        if self._judged is None and self._outputs is not None and trains(args):
            call = _Call(args, kwargs, self._outputs)
            self._computed |= call.computed
            if not call.computed and any(isinstance(x, _View) for x in call.leaves):
                self._judged = call
                self._outputs = []  # placeholders stand for them now

    def _guarded(self, body: Callable[..., None], *args: Any) -> None:
        if torch.compiler.is_compiling() or reruns() or not torch.is_grad_enabled():
            return
        try:
            with ThreadState(), torch._C.DisableTorchFunction():
                run_apart(body, *args)
        except Exception as error:
            self._fail(error)


def _tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors in a module's output."""
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and _has_memory(x)]


def _has_memory(x: Tensor) -> bool:
    return x.layout is torch.strided and torch._C._has_storage(x)


def _placed(x: Any, outputs: Sequence[tuple[Tensor, int]]) -> Any:
    """Return a placeholder for an output, a tensor without its graph, or another value itself."""
    if not isinstance(x, Tensor):
        return x
    for number, (output, then) in enumerate(outputs):
        is_view = _has_memory(x) and x.untyped_storage()._cdata == output.untyped_storage()._cdata
        if is_view and version(x) == then:
            return _View(number, _Form.of(output), _Form.of(x))
    return x if x.is_leaf else x.detach()


def _cut(x: Any, samples: int | None = None) -> Any:
    """Return a copy of a tensor on the first samples, without its graph."""
    if not isinstance(x, Tensor):
        return x
    part = x.detach() if samples is None or not x.dim() else x.detach()[:samples]
    return part.clone().requires_grad_(x.requires_grad and x.is_leaf)


def _of_samples(loss: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return a torch loss for each sample, or None for other modules."""
    if not isinstance(loss, _Loss) or loss.reduction == "none":
        return None
    twin = copy.copy(loss)
    twin.reduction = "none"
    found: Tensor = twin.forward(*args, **kwargs)
    return found
