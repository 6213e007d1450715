"""The functions that a pass calls, in order, each with its place, and what derives from them."""

import inspect
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from adiv_monitor.audit.training.batches import copied, tensors
from adiv_monitor.audit.training.setup import Fork, Loss, seeded

# Folders whose frames are skipped when the caller's line is searched: torch's and this package's.
_BETWEEN = tuple(f"{p}{os.sep}" for p in (Path(torch.__file__).parent, Path(__file__).parents[2]))


class Call(NamedTuple):
    """One call of a function.

    Attributes:
        number: Position in the order of one pass, from 0.
        name: Name of the function, without the trailing underscore of in-place functions.
        path: Path of the innermost running module; None: no module runs, as in the loss.
        args: The positional arguments.
        kwargs: The keyword arguments.
        result: The result.
        function: The function.
        line: File and line of the calling code; "": unknown.
    """

    number: int
    name: str
    path: str | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any
    function: Callable[..., Any]
    line: str = ""

    @property
    def place(self) -> str:
        """The place in words: the function, the module that it runs in, and its line."""
        where = f" in '{self.path}'" if self.path else ""
        return f"{self.name}{where}" + (f" ({self.line})" if self.line else "")

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument by its position, or by its name."""
        return self.args[place] if place < len(self.args) else self.kwargs.get(name, default)


See = Callable[[Call], None]
Change = Callable[[Call], Any]


def see_calls(fork: Fork, see: See, batch: Any = None, change: Change | None = None) -> Tensor:
    """Run a fork's loss of a batch and report every call.

    Args:
        fork: A copy, whose buffers may change.
        see: Function that is called with each call after it has returned.
        batch: The batch; None: the fork's first.
        change: As for `change_calls`, in this pass alone; None: nothing changes.

    Returns:
        The loss.
    """
    batch = copied(fork.batches[0] if batch is None else batch)
    with seeded(fork.seed):
        return watched(fork.loss, see, change)(fork.model, batch)


def change_calls(fork: Fork, change: Change) -> None:
    """Replace the results of some functions that a fork's loss calls, from now on.

    Args:
        fork: A copy to train.
        change: Function from a call, whose `result` is `NotImplemented`, to the new result; if it
            returns `NotImplemented`, the function runs as usual.
    """
    fork.loss = watched(fork.loss, change=change)


def watched(loss: Loss, see: See | None = None, change: Change | None = None) -> Loss:
    """Return the loss with its calls reported, as by `see_calls`, or changed."""

    def run(model: nn.Module, batch: Any) -> Tensor:
        with Watched(model, see, change):
            return loss(model, batch)

    return run


def calls_of(fork: Fork, is_met: Callable[[Call], object], batch: Any = None) -> list[Call]:
    """Return the calls of a batch's loss, by default the first, that meet a condition."""
    found: list[Call] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run has shown them
        see_calls(fork, lambda call: found.append(call) if is_met(call) else None, batch)
    return found


class Watched(TorchFunctionMode):
    """Reports each function that is called inside the context, and its place.

    `see` gets each call after it has returned, and `change` before it runs, as in `change_calls`.
    """

    def __init__(
        self, model: nn.Module, see: See | None = None, change: Change | None = None
    ) -> None:
        super().__init__()
        self._model, self._see, self._change = model, see, change
        self._within: list[str] = []
        self._number = 0
        self._hooks = ExitStack()

    def __enter__(self) -> "Watched":
        for path, module in self._model.named_modules():
            into = module.register_forward_pre_hook(lambda *_, path=path: self._within.append(path))
            out = module.register_forward_hook(lambda *_: self._leave(), always_call=True)
            self._hooks.enter_context(into)
            self._hooks.enter_context(out)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._hooks.close()

    def _leave(self) -> None:
        self._within.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        path = self._within[-1] if self._within else None
        name = getattr(func, "__name__", "")
        name = name if name.startswith("__") else name.rstrip("_")
        call = Call(self._number, name, path, args, kwargs, NotImplemented, func)
        self._number += 1
        result = self._change(call) if self._change is not None else NotImplemented
        if result is NotImplemented:
            result = func(*args, **kwargs)
        if self._see is not None:
            self._see(call._replace(result=result, line=_line()))
        return result


def _line() -> str:
    """Return file and line of the innermost caller outside torch and this package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_callers(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


@cache
def is_callers(file: str) -> bool:
    """Return whether a file of code is neither torch's nor this package's."""
    return file.endswith(".py") and not file.startswith(_BETWEEN)


# What derives, entry by entry, from the result of some function


# Functions that do more than move, mask or map entries one by one.
PRODUCTS = ("matmul", "bmm", "baddbmm", "einsum", "mm", "linear")
LAYERS = ("bilinear", "embedding", "scaled_dot_product_attention", "multi_head_attention_forward",
          "lstm", "gru", "rnn_tanh", "rnn_relu")  # fmt: skip


class Derived:
    """Follows tensors through a pass, as its calls are reported in order.

    A tensor derives from a call if it is its result, or the result of a function of a tensor that
    derives from it: a part of that tensor, or one with as many entries, by a view, a permutation, a
    mask, a scaling or an activation. Products, layers and convolutions end the chain.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[Tensor, Call]] = {}  # tensors are held so that ids stay unique

    def begin(self, call: Call) -> None:
        """Let the results of a call derive from it."""
        for x in tensors(call.result):
            self._of[id(x)] = x, call

    def follow(self, call: Call) -> None:
        """Note the results of a call that derive from what its arguments derive from."""
        if call.name in (*PRODUCTS, *LAYERS) or call.name.startswith("conv"):
            return
        for before in given(call):
            if (source := self.source(before)) is None:
                continue
            for x in tensors(call.result):
                is_part = call.name == "__getitem__" or x.numel() == before.numel()
                if is_part and x is not before:
                    self._of.setdefault(id(x), (x, source))

    def source(self, x: object) -> Call | None:
        """Return the call that a tensor derives from; None: none."""
        found = self._of.get(id(x))
        return None if found is None else found[1]


def given(call: Call) -> list[Tensor]:
    """Return the tensors in a call's arguments."""
    return [*tensors([*call.args, *call.kwargs.values()])]


# Dropout


FUNCTIONS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d",
             "dropout3d", "feature_dropout")  # fmt: skip


def rate_of(call: Call) -> float:
    """Return the share that a call of a dropout function drops; 0 for other functions."""
    if call.name not in FUNCTIONS or not call.argument(2, "training", True):
        return 0.0
    rate = call.argument(1, "p", 0.5)
    return float(rate) if isinstance(rate, (int, float)) else math.nan


def with_rate(call: Call, rate: float) -> object:
    """Return the result of the same function at another rate."""
    x = call.argument(0, "input")
    others = {k: v for k, v in call.kwargs.items() if k not in ("input", "p")}
    return call.function(x, rate, *call.args[2:], **others)


def undropped(call: Call) -> object:
    """Return the result of a dropout that drops nothing; `NotImplemented` for other functions."""
    return with_rate(call, 0.0) if rate_of(call) > 0 else NotImplemented


# The arguments of a module's forward pass, by name


# Words in the names of arguments that are not inputs.
_NO_INPUTS = ("label", "target", "mask", "annot", "box", "truth")


def by_name(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward pass by name; those without a name have a number."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    own = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [*own, *map(str, range(len(own), len(args)))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def changed(
    module: nn.Module, args: Any, kwargs: dict[str, Any], change: Callable[[str, Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward pass, each replaced by `change(name, value)`."""
    new = [change(name, value) for name, value in by_name(module, args, kwargs).items()]
    return tuple(new[: len(args)]), dict(zip(kwargs, new[len(args) :], strict=True))


def is_input(name: str) -> bool:
    """Return whether an argument of this name is an input, not a label, a target or a mask."""
    return not any(word in name.lower() for word in _NO_INPUTS)


def is_list(value: Any) -> bool:
    """Return whether an argument is a list of tensors, which may be the samples themselves."""
    several = isinstance(value, (list, tuple)) and len(value) > 1
    return several and all(isinstance(item, Tensor) for item in value)
