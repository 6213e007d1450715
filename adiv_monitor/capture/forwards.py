"""The forward calls that run in a thread, and the torch functions that are called in them."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from adiv_monitor.capture.site import Called
from adiv_monitor.rerun.randomness import Randomness

Function = Callable[..., Any]


@dataclass(eq=False)
class FunctionToCall:
    """A call of a torch function that runs exactly once, even if code around it fails.

    Attributes:
        function: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        error: the exception that it raised.
    """

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    error: BaseException | None = None
    _results: list[Any] = field(default_factory=list)

    def __call__(self, twin: Function | None = None) -> Any:
        """Return the result; the first call runs the function, or an equivalent `twin`."""
        if not self._results:
            try:
                self._results.append((twin or self.function)(*self.args, **self.kwargs))
            except BaseException as error:
                self.error = error
                raise
        return self._results[0]


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

    def opened(self, call: FunctionToCall) -> Any:
        """Call a Python function of torch with the calls inside it watched."""
        assert self.mode is not None
        twin = without_overrides(call.function)
        outside, self.inside = self.inside, call.function.__name__
        try:
            with self.mode:
                return call(twin)
        finally:
            self.inside = outside


@cache
def without_overrides(function: FunctionType) -> Function:
    """Return a copy of a Python function of torch that no function mode intercepts as a whole."""
    names = [name for name in function.__globals__ if name.startswith("has_torch_function")]
    twin = FunctionType(
        function.__code__,
        {**function.__globals__, **dict.fromkeys(names, lambda *_: False)},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin
