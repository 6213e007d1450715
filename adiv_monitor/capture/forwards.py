"""The forward calls that run in a thread, and the torch functions that are called in them."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from adiv_monitor.capture.selection import Layer
from adiv_monitor.rerun.surroundings import Randomness

Function = Callable[..., Any]


@dataclass(eq=False)
class Called:
    """A call of a torch function.

    Attributes:
        function: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        result: its result.
        layers: the layers of its uses, in order.
        versions: the versions of arguments and result when it returned.
    """

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    layers: Sequence[Layer] = ()
    versions: Sequence[int] = ()

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.function, "__name__", "")


# These functions are written in Python; the functions that they call use the parameters.
OPENED = ("multi_head_attention_forward",)


@dataclass(frozen=True, eq=False)
class Forward:
    """A running forward call.

    Attributes:
        module: the module.
        random: the state of the random numbers at its beginning.
        is_open: whether the functions in it are watched.
        called: the calls in it that take trained parameters, without those in nested forwards.
    """

    module: nn.Module
    random: Randomness
    is_open: bool
    called: list[Called] = field(default_factory=list)


class Forwards(threading.local):
    """The forward calls that run in one thread.

    Attributes:
        running: these calls, outermost first.
        mode: the mode that intercepts functions, while it is on.
        inside: the name of the opened function that runs; "" if there is none.
        known: the module whose known use is taken.
    """

    def __init__(self) -> None:
        self.running: list[Forward] = []
        self.mode: TorchFunctionMode | None = None
        self.inside = ""
        self.known: nn.Module | None = None

    @property
    def forward(self) -> Forward:
        """The innermost forward call."""
        return self.running[-1]

    @property
    def innermost(self) -> nn.Module:
        """The module whose forward runs, or the module whose known use is taken."""
        return self.forward.module if self.known is None else self.known

    def opened(self, function: Function, *args: Any, **kwargs: Any) -> Any:
        """Call a Python function of torch with the calls inside it watched."""
        assert self.mode is not None
        separate = kwargs.get("use_separate_proj_weight")  # of attention: then none is packed
        outside, self.inside = self.inside, "" if separate else function.__name__
        try:
            with self.mode:
                return without_overrides(function)(*args, **kwargs)
        finally:
            self.inside = outside


@cache
def without_overrides(function: Any) -> Function:
    """Return a copy of a Python function of torch that no function mode intercepts as a whole."""
    names = [name for name in function.__globals__ if name.startswith("has_torch_function")]
    plain = {**function.__globals__, **dict.fromkeys(names, lambda *_: False)}
    return FunctionType(function.__code__, plain, function.__name__, function.__defaults__)
