"""After an interrupt anywhere in a training, closing the monitor leaves nothing behind.

The training can also go on with the monitor, and is then as without it.
"""

import gc
from contextlib import suppress
from typing import Any

import pytest
import torch
from faults.injection import Boundary, Raising, Watched
from faults.scenarios import SCENARIOS
from faults.trial import afterwards_clean, changed, forget_caches
from faults.world import Result, result, surroundings
from torch import Tensor

from adiv_monitor import Monitor

NAMES = tuple(name for name in SCENARIOS if not name.startswith("function"))
SOME = 4  # without `--whole`, one scenario in this many
EVERY = 23  # without `--whole`, one function in this many
# Some run in garbage collections, too; and what an interrupted removal leaves, it leaves.
UNTRIED = ("__del__", "_check_attached", "_remove", "remove", "leave", "detach", "release")


class Training:
    """A training of one of the scenarios, which can begin again after an interrupt."""

    def __init__(self, name: str) -> None:
        forget_caches()
        gc.collect()  # of an earlier training
        self._scenario = SCENARIOS[name]
        self._model, self._optimizer = self._scenario.make()
        self._start = [x.detach().clone() for x in self._model.state_dict(keep_vars=True).values()]
        self._before = surroundings(self._model, self._optimizer)
        options = {"every_n_steps": 1, "on_error": "raise", **self._scenario.options()}
        self.monitor = Monitor(self._model, self._optimizer, **options)

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
        return changed(self._before, surroundings(self._model, self._optimizer))


def expected(name: str) -> Result:
    training = Training(name)
    training.monitor.close()  # unused
    return training.again()


def boundaries(name: str) -> list[Boundary]:
    training, watched = Training(name), Watched()
    with training.monitor, watched:
        training.steps()
    return [at for at in watched.boundaries if at.name not in UNTRIED]


@pytest.mark.slow(one_in=SOME)
@pytest.mark.parametrize("name", NAMES)
def test_an_interrupt_leaves_nothing_behind(name: str, whole: bool) -> None:
    plain = expected(name)
    for at in boundaries(name)[:: 1 if whole else EVERY]:
        with afterwards_clean():
            training, raising = Training(name), Raising(KeyboardInterrupt(), at)
            training.monitor.attach()
            with suppress(KeyboardInterrupt), raising:
                training.steps()
            assert raising.raised, f"{at}: not reached"
            assert training.again() == plain, f"{at}: changed the training"
            training.monitor.close()
            assert not training.left(), f"{at}: left {training.left()}"
