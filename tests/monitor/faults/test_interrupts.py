"""An interrupt between any two byte codes of the monitor leaves nothing behind.

The tests find every byte code that the monitor executes in a training, from attaching to closing. A
KeyboardInterrupt is raised before one of them, in one training after another. The byte codes that
are tried are evenly spaced.
"""

from contextlib import suppress
from functools import cache
from math import inf
from typing import Any

import pytest
import torch
from faults.injection import Executed, Instruction, Interrupting
from faults.scenarios import SCENARIOS
from faults.trial import afterwards_clean, changed, forget_caches
from faults.world import Result, result, surroundings
from torch import Tensor, nn

from adiv_monitor import Monitor
from adiv_monitor.capture.hook import _AFTER_MODULE, _BEFORE_MODULE, Hook, ModuleHook
from adiv_monitor.rerun.thread import surely

# Files that install and remove hooks, of which more byte codes are tried than elsewhere.
ARMING = (
    *("monitor.py", "step/controller.py", "step/phases.py"),
    *("capture/guard.py", "capture/hook.py", "capture/forwards.py", "capture/loss_hook.py"),
    *("capture/capture.py", "capture/late_rows.py"),
    *("rerun/thread.py", "rerun/eager.py", "rerun/surroundings.py"),
)
# One byte code in this many is tried in those files, and one in this many elsewhere; one of the
# third number of them also without a `with` block, or with `--whole` as many others. Every byte
# code of all scenarios takes hours.
EVERY, EVERY_WHOLE = (241, 1601, 5), (5, 41, 1)
NAMES = tuple(name for name in SCENARIOS if not name.startswith("function"))
SOME = 4  # without `--whole`, one scenario in this many

# These are restored after every interrupt. A function mode may remain until the next forward pass,
# or the end of the monitor: if an interrupt leaves a forward, torch calls no hook.
OF_THREAD = (
    *("function override", "dispatch modes", "gradients", "inference", "autocast"),
    *("saved tensors", "aside", "rerun"),
)
EDGES = [f.__code__ for f in (Monitor.attach, Monitor.__enter__, Monitor.__exit__)]
# Python swallows exceptions during garbage collection, in which these run.
COLLECTED = [f.__code__ for f in (Monitor.__del__, Monitor._check_attached)]


class Training:
    """A training of one of the scenarios, which can continue after an interrupt."""

    def __init__(self, name: str) -> None:
        forget_caches()
        self._scenario = SCENARIOS[name]
        self._model, self._optimizer = self._scenario.make()
        self._start = [x.detach().clone() for x in self._model.state_dict(keep_vars=True).values()]
        self._outputs: list[Any] = []
        self._model.register_forward_hook(self._keep)
        options = {"every_n_steps": 1, "on_error": "raise", **self._scenario.options()}
        self._others = [x for x in options.values() if isinstance(x, nn.Module)]
        self._before = self._surroundings()
        self.monitor = Monitor(self._model, self._optimizer, **options)

    def _keep(self, module: nn.Module, args: object, output: object) -> None:
        self._outputs.append(output)

    def _surroundings(self) -> dict[str, Any]:
        return surroundings(nn.ModuleList([self._model, *self._others]), self._optimizer)

    def steps(self) -> list[Tensor]:
        scenario = self._scenario
        return [
            scenario.step(self._model, self._optimizer, scenario.loss)
            for _ in range(scenario.steps)
        ]

    def again(self) -> Result:
        """Return the result of a training from the initial state."""
        state = self._model.state_dict(keep_vars=True).values()
        with torch.no_grad():
            for tensor, value in zip(state, self._start, strict=True):
                tensor.copy_(value)
                tensor.grad = None
        self._optimizer.state.clear()
        self._scenario.make()  # seeds the random generators
        return result(self._model, self._optimizer, self.steps())

    def left(self) -> dict[str, Any]:
        """Return hooks, modes and stances that differ from those before."""
        found = changed(self._before, self._surroundings())
        for number, output in enumerate(self._outputs):
            if isinstance(output, Tensor) and output._backward_hooks:
                found[f"output {number}"] = list(output._backward_hooks.values())
        return found


@cache
def expected(name: str) -> Result:
    training = Training(name)
    training.monitor.close()  # unused
    return training.again()


@cache
def executed(names: tuple[str, ...], calls: float) -> dict[str, list[Instruction]]:
    """Return by scenario the byte codes that it reaches first, in `calls` calls of a function.

    Args:
        names: the scenarios.
        calls: of one function, in which byte codes are sought.
    """
    found: dict[str, list[Instruction]] = {}
    seen: set[object] = set()
    for name in names:
        training, noted = Training(name), Executed(calls)
        with noted, training.monitor:
            training.steps()
        found[name] = []
        for instruction in noted.instructions:
            if instruction[:2] not in seen:
                seen.add(instruction[:2])
                found[name].append(instruction)
    return found


def interrupt(name: str, at: Instruction, *, within: bool) -> None:
    """Train until the interrupt, continue, and assert that all is as without it.

    Args:
        name: of the scenario.
        at: byte code at which to interrupt.
        within: whether a `with` closes the monitor; otherwise it stays attached.
    """
    training = Training(name)
    monitor, interrupting = training.monitor, Interrupting(at)
    with afterwards_clean():
        try:
            with interrupting:
                if within:
                    with monitor:
                        training.steps()
                else:
                    monitor.attach()
                    training.steps()
                    monitor.close()
        except KeyboardInterrupt:
            pass
        assert interrupting.raised or not within, f"{at}: not reached"
        left = training.left()
        # A gap in Python itself: the last byte codes before a `with` begins, the first ones of its
        # end.
        if within and not (at.code in EDGES and monitor._state == "attached"):
            assert not left, f"{at}: left {left}"
        assert left.keys().isdisjoint(OF_THREAD), f"{at}: left {left}"
        if monitor._state == "new":  # attaching had not begun
            monitor.close()
        assert training.again() == expected(name), f"{at}: changed the training"
        monitor.close()
        left = training.left()
        assert not left, f"{at}: left {left} when closed"


@pytest.mark.slow(one_in=SOME)
@pytest.mark.parametrize("name", NAMES)
def test_an_interrupt_leaves_nothing_behind(name: str, whole: bool) -> None:
    found = executed(NAMES, inf) if whole else executed(NAMES[::SOME], 2)
    instructions = [at for at in found[name] if at.code not in COLLECTED]
    arming = [at for at in instructions if at.file in ARMING]
    others = [at for at in instructions if at.file not in ARMING]
    of_arming, of_others, attached = EVERY_WHOLE if whole else EVERY
    tried = arming[::of_arming] + others[::of_others]
    for at in tried:
        interrupt(name, at, within=True)
    if whole:
        tried = arming[of_arming // 2 :: of_arming] + others[of_others // 2 :: of_others]
    for at in tried[::attached]:
        interrupt(name, at, within=False)


def hooked(context: Any, *, before: bool) -> nn.Module:
    """Return a module that had a hook, in a context that may interrupt this."""
    module = nn.Linear(2, 2)
    hook = ModuleHook(module, Hook(lambda *_: None), before=before)
    with suppress(KeyboardInterrupt), context:
        try:
            hook.put_on()
        finally:
            surely(hook.remove)
    return module


@pytest.mark.parametrize("before", [True, False])
def test_an_interrupt_anywhere_in_a_hook_leaves_its_tables_as_they_were(before: bool) -> None:
    hooked(found := Executed(), before=before)
    tried = [at for at in found.instructions if at.file == "capture/hook.py"]
    assert len(tried) > 100
    for at in tried:
        module = hooked(Interrupting(at), before=before)
        for name in (*_BEFORE_MODULE, *_AFTER_MODULE):
            table = getattr(module, name)
            assert not table and not vars(table), f"{at}: {name} has {vars(table)}"


def left_by_encoders(context: Any) -> dict[str, Any]:
    """Return what differs after a forward pass, in a context that may interrupt it."""
    torch.manual_seed(0)
    trained, frozen = (nn.TransformerEncoderLayer(4, 2, 4, batch_first=True) for _ in range(2))
    model = nn.Sequential(nn.Linear(4, 4), trained, frozen.eval().requires_grad_(False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = surroundings(model, optimizer)
    with suppress(KeyboardInterrupt), Monitor(model, optimizer), context:
        model(torch.ones(1, 2, 4))
    return changed(before, surroundings(model, optimizer))


@pytest.mark.filterwarnings("ignore:adiv_monitor. the model ran")
def test_an_interrupt_inside_torchs_encoder_leaves_nothing_behind(whole: bool) -> None:
    """Its forward is wrapped, so that it takes the path that it takes without a monitor."""
    found = Executed(calls=12)
    assert not left_by_encoders(found)
    in_file = [at for at in found.instructions if at.file == "capture/forwards.py"]
    wrapped = [at for at in in_file if at.code.co_name == "as_unwatched"]
    assert wrapped
    for at in [*in_file[:: 5 if whole else 101], *wrapped[:: 1 if whole else 11]]:
        with afterwards_clean():
            left = left_by_encoders(Interrupting(at))
            assert not left, f"{at}: left {left}"
