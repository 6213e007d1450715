"""The probe's batch: samples of the first forward pass of the first measured step."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

from adiv_monitor.capture.guard import Guard, call_all
from adiv_monitor.capture.hook import Hook, trains
from adiv_monitor.capture.loss_hook import LossOf
from adiv_monitor.capture.selection import is_wrapper, trainable
from adiv_monitor.capture.weights.pieces import Strides
from adiv_monitor.features.rows import shares_memory, to_compute_dtype
from adiv_monitor.features.uses import Refused
from adiv_monitor.rerun.surroundings import Randomness, Surroundings, devices_of, reruns, version

SAMPLES = 8
# Arguments of these types do not hold tensors that have to be cut, too.
_PLAIN = bool | int | float | complex | str | bytes | slice | range | torch.dtype | torch.device


class _View(NamedTuple):
    """A placeholder for an argument of the loss that is an output of the model, or its view.

    Attributes:
        number: of the output.
        of: its shape.
        place: the place of the argument in it.
    """

    number: int
    of: torch.Size
    place: Strides

    def again(self, outputs: Sequence[Tensor], samples: int | None) -> Tensor:
        """Return the view of the output of another call, perhaps on fewer samples."""
        size, kept = self.place.size, 0 if samples is None else 1
        found = outputs[self.number].shape if self.number < len(outputs) else ()
        if not outputs or found[kept:] != self.of[kept:]:
            raise Refused("the model returns tensors of other shapes when it runs again")
        size = size if samples is None else (samples, *size[1:])
        return replace(self.place, size=size).of(outputs[self.number])


class _Call:
    """The arguments of one call.

    Args:
        args: the positional arguments.
        kwargs: the named arguments.
        outputs: outputs of the model, with their versions.

    Attributes:
        leaves: the leaves of these; tensors are copies without their graph.
        computed: whether something else than the model's outputs was computed with a graph.
    """

    def __init__(self, args: Any, kwargs: Any, outputs: Sequence[tuple[Tensor, int]] = ()) -> None:
        given, self._structure = tree_flatten((args, kwargs))
        self.leaves = [_placed(x, outputs) for x in given]
        pairs = zip(given, self.leaves, strict=True)
        self.computed = any(isinstance(held, Tensor) and x.grad_fn is not None for x, held in pairs)

    def sizes(self) -> set[int]:
        """Return the sizes of dimension 0 of all tensors; −1 for what may hold others."""
        found = set[int]()
        for x in self.leaves:
            if isinstance(x, _View):
                found.update(x.place.size[:1])
            elif isinstance(x, Tensor) and x.layout is torch.strided:
                found.update(x.shape[:1])
            elif not (x is None or isinstance(x, _PLAIN | nn.Module)):
                found.add(-1)
        return found

    def cut(self, samples: int | None) -> None:
        """Keep the first samples alone; None: all."""
        self.leaves = [_cut(x, samples) for x in self.leaves]

    def again(self, outputs: Sequence[Tensor], samples: int | None) -> Any:
        """Return copies of the arguments, with the outputs of another call of the model."""
        several = [x.again(outputs, samples) if isinstance(x, _View) else x for x in self.leaves]
        pairs = zip(several, self.leaves, strict=True)
        return tree_unflatten([_cut(x) if x is held else x for x, held in pairs], self._structure)


class Batch:
    """The first forward pass with gradients while its hooks are on, and the arguments of its loss.

    Args:
        model: the model.
        loss: the loss; None: there is none.
        fail: called with the exception if recording fails.

    Attributes:
        modules: all modules of the model and of the loss that are no wrappers.
        is_fixed: whether it is the probe already.
        surroundings: autocast's settings and random numbers of that call.
    """

    surroundings: Surroundings

    def __init__(
        self, model: nn.Module, loss: LossOf | None, fail: Callable[[Exception], None]
    ) -> None:
        of_loss = loss.modules() if isinstance(loss, nn.Module) else ()
        every = dict.fromkeys((*model.modules(), *of_loss))
        self.modules = [module for module in every if not is_wrapper(module)]
        self.is_fixed = False
        self._loss, self._fail = loss, fail
        self._module: nn.Module | None = None  # the model, or the first part of it that is called
        self._call: _Call | None = None
        self._why_not_whole = ""
        self._outputs: list[tuple[Tensor, int]] | None = None  # None: the module has not returned
        self._judged: _Call | None = None
        self._samples: int | None = None
        self._hooks: list[RemovableHandle] = []

    # --- the first forward pass ------------------------------------------------------------------

    def put_on(self, modules: Iterable[nn.Module]) -> None:
        """Record the first call among modules. `remove` removes the hooks, even if this raises."""
        self._module = self._call = self._outputs = self._judged = None
        self._guard = Guard(self._fail)
        self._hooks = []
        begins, ends, judges = (
            Hook(self._guarded, body) for body in (self._begins, self._ends, self._judges)
        )
        given: dict[str, Any] = {"with_kwargs": True}
        first = {**given, "prepend": True}  # before all other hooks
        for module in (module for module in modules if not is_wrapper(module)):
            self._hooks.append(module.register_forward_pre_hook(begins, **first))
            self._hooks.append(module.register_forward_hook(ends, **given))
        if isinstance(self._loss, nn.Module):
            self._hooks.append(self._loss.register_forward_pre_hook(judges, **first))

    def remove(self) -> None:
        """Remove the hooks."""
        call_all(*(hook.remove for hook in self._hooks))

    def fix(self) -> None:
        """Make what was recorded the probe.

        Raises:
            Refused: no forward pass was seen.
        """
        if self._call is None or self._outputs is None:
            raise Refused("no forward pass of the model was seen")
        calls = [call for call in (self._call, self._judged) if call is not None]
        sizes = set[int]().union(*(call.sizes() for call in calls))
        self._samples = SAMPLES if len(sizes) == 1 and min(sizes) > SAMPLES else None
        for call in calls:
            call.cut(self._samples)
        self.is_fixed, self._outputs = True, []

    def _begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._call is None and trains(args) and torch._C._current_graph_task_id() == -1:
            call = _Call(args, kwargs)
            if 0 not in call.sizes():  # a micro-batch may have no samples
                self.surroundings = Surroundings(Randomness(devices_of(self.modules), others=True))
                self._module, self._call = module, call
                left = {*trainable(self.modules[0])} - {*trainable(module)}
                self._why_not_whole = (
                    "The loss on the probe is not known: its function takes the model's output, "
                    f"and a part of the model, {type(module).__name__}, was called first."
                ) * bool(left)

    def _ends(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module is self._module and self._outputs is None:
            self._outputs = [(x.detach(), version(x)) for x in _tensors_of(output)]

    def _judges(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._judged is None and self._outputs is not None and trains(args):
            call = _Call(args, kwargs, self._outputs)
            if not call.computed and any(isinstance(x, _View) for x in call.leaves):
                self._judged = call
                self._outputs = []  # placeholders stand for them now

    def _guarded(self, body: Callable[..., None], *args: Any) -> None:
        if torch.is_grad_enabled() and not (torch.compiler.is_compiling() or reruns()):
            self._guard(body, *args)

    # --- the probe -------------------------------------------------------------------------------

    @property
    def why_no_loss(self) -> str:
        """Why the loss is not known; "" if it is."""
        if self._loss is None:
            return (
                "realised_cosine and the cosines of attention are missing: they need the loss; "
                "pass it as `loss=` or `realised=`."
            )
        if not isinstance(self._loss, nn.Module):
            return self._why_not_whole
        if self._judged is not None:
            return ""
        return (
            f"The loss on the probe is not known: {type(self._loss).__name__} was not seen to be "
            "called with the output of the module that was called (is it another instance than the "
            "loop's, is it called inside of the model, or is its input computed from the output, "
            "outside of a module?); a function of the output is an alternative, if the model is "
            "called as a whole."
        )

    def run(self) -> Tensor | None:
        """Call the module, and return the loss of all samples, or their mean, if it is known.

        Raises:
            TypeError: the loss is no tensor.
        """
        assert self._module is not None and self._call is not None
        args, kwargs = self._call.again((), self._samples)
        output = self._module(*args, **kwargs)
        if self._loss is None or self.why_no_loss:
            return None
        if isinstance(self._loss, nn.Module):
            assert self._judged is not None
            args, kwargs = self._judged.again(_tensors_of(output), self._samples)
            loss = self._loss(*args, **kwargs)
        else:
            loss = self._loss(output)
        if not isinstance(loss, Tensor):
            raise TypeError(f"the loss is a {type(loss).__name__}, expected a tensor")
        return to_compute_dtype(loss).mean()


def _tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors in a module's output."""
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and _has_memory(x)]


def _has_memory(x: Tensor) -> bool:
    return x.layout is torch.strided and torch._C._has_storage(x)


def _placed(x: Any, outputs: Sequence[tuple[Tensor, int]]) -> Any:
    """Return a placeholder for an output, a copy of a tensor, or another value itself."""
    for number, (output, then) in enumerate(outputs if isinstance(x, Tensor) else ()):
        if _has_memory(x) and shares_memory(x, output) and version(x) == then:
            return _View(number, output.shape, Strides.between(x, output))
    return _cut(x)


def _cut(x: Any, samples: int | None = None) -> Any:
    """Return a copy of a tensor on the first samples, without its graph."""
    if not isinstance(x, Tensor):
        return x
    part = x.detach() if samples is None or not x.dim() else x.detach()[:samples]
    return part.clone().requires_grad_(x.requires_grad and x.is_leaf)
