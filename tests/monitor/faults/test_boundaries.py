"""Wherever the monitor fails, training continues as without it, and the report names the loss.

Every function of the monitor that runs during a training is a boundary, found by watching a
training: in one training after another, an exception is raised where such a function begins. So a
new rule, measure or hook is covered automatically, if one of the scenarios reaches it.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch
from faults.injection import Boundary, Raising, Watched
from faults.scenarios import SCENARIOS
from faults.trial import REASON, Fault, Trial, forget_caches, take, unmonitored

import adiv_monitor
from adiv_monitor.capture.guard import Guard
from adiv_monitor.features import registry, uses

HOME = Path(adiv_monitor.__file__).parent
# The modules that run in a measured step; those for several ranks are not reached here.
ROOMS = (
    *("rerun", "capture", "features", "maths", "probe", "step", "alignment"),
    *("alarms.py", "monitor.py"),
)
ELSEWHERE = {
    *("merge.py", "ranks.py", "unsharded.py", "messages.py"),
    *("guard.py", "thread.py", "failures.py"),  # these keep faults away
    "context.py",  # it declares functions
}
FILES = sorted(
    str(file.relative_to(HOME))
    for file in HOME.rglob("*.py")
    if file.relative_to(HOME).parts[0] in ROOMS
    and "def " in file.read_text()
    and file.name not in ELSEWHERE
)

# Code that catches faults cannot fail itself: it is short, and calls no other code.
GUARDS = {
    "capture/watch.py": {
        *("__torch_function__", "_guarded", "_before", "_after", "_take", "_counts")
    },
    "capture/catch.py": {"_reached", "_begins"},
    "capture/forwards.py": {"opened", "without_overrides", "<lambda>"},  # they call torch's own
    # They pass their arguments to a guarded function; hooks are also removed with garbage.
    "capture/hook.py": {"__call__", "<lambda>", "hook", "remove"},
    "probe/batch.py": {"_guarded"},
    # They end a context, or read a flag.
    "alignment/passes.py": {"__exit__"},
    "probe/recording.py": {"__exit__"},
    "rerun/eager.py": {"__exit__"},
    "rerun/surroundings.py": {"reruns"},
    "capture/loss_hook.py": {"_guarded"},
    "features/rows.py": {"<lambda>"},  # as a tensor ends: Python drops what a weakref.ref raises
    "step/armed.py": {"release", "_ran"},
    "step/controller.py": {"leave", "release", "closure_then_read", "<lambda>"},
    "step/stepping.py": {"_safely"},
    "monitor.py": {
        *("__enter__", "__exit__", "attach", "_attach", "close", "_close"),
        *("_before_step", "_after_step", "_guarded", "_take_off"),
    },
}


def is_guard(boundary: Boundary) -> bool:
    if Path(boundary.file).name in ("failures.py", "guard.py", "thread.py"):
        return True
    if boundary.name in GUARDS.get(boundary.file, ()):
        return True
    return (boundary.file, boundary.name) == ("capture/forwards.py", "__init__")


@cache
def scenario_of() -> dict[Boundary, str]:
    """Return every boundary with the first scenario that reaches it, undisturbed."""
    found: dict[Boundary, str] = {}
    stems: set[str] = set()
    for name, scenario in SCENARIOS.items():
        stem = re.split(r"[- ]", name.removeprefix("function "))[0]
        if stem in stems and name.startswith("function "):
            continue  # another call of the same function
        stems.add(stem)
        forget_caches()
        watched = Watched()
        trial = take(scenario, watched, on_error="raise")
        assert trial.raised is None and trial.result == unmonitored(name) and not trial.left, name
        for boundary in watched.boundaries:
            if not is_guard(boundary):
                found.setdefault(boundary, name)
    return found


def in_file(file: str, every: int = 1) -> Iterator[tuple[int, Boundary, str]]:
    """Yield every n-th boundary of the file, the first among them."""
    found = enumerate(scenario_of().items())
    here = ((number, at, name) for number, (at, name) in found if at.file == file)
    return islice(here, 0, None, every)


def with_fault(error: BaseException, at: Boundary, name: str, on_error: str) -> Trial:
    forget_caches()
    raising = Raising(error, at)
    trial = take(SCENARIOS[name], raising, on_error=on_error)
    assert raising.raised, f"{at} was not called"
    assert not trial.left, f"{at}: left {trial.left}"
    return trial


@cache
def unharmed(name: str) -> Trial:
    return take(SCENARIOS[name])


def readings(trial: Trial) -> list[object]:
    """Return the names of the measures in a trial's reports."""
    return [
        {path: sorted(reading.measures()) for path, reading in report.layers.items()}
        for report in trial.reports
    ]


ERRORS = (Fault, torch.OutOfMemoryError, MemoryError, OSError)


@pytest.mark.slow(one_in=12)
@pytest.mark.parametrize("file", FILES)
def test_an_exception_does_not_reach_the_training(file: str, whole: bool) -> None:
    """Weights, losses, buffers, optimizer state and random numbers are as without the error."""
    for number, boundary, name in in_file(file, 1 if whole else 5):
        error = ERRORS[number % len(ERRORS)](REASON)
        trial = with_fault(error, boundary, name, "warn")
        assert trial.raised is None, f"{boundary}: {trial.raised!r}"
        assert trial.result == unmonitored(name), f"{boundary} changed the training"
        kept = readings(trial) == readings(unharmed(name))
        assert trial.warned or trial.told or kept, f"{boundary}: nothing was said of it"
        assert len(set(trial.warned)) == len(trial.warned), f"{boundary}: {trial.warned}"


@pytest.mark.slow(one_in=12, first=1)
@pytest.mark.parametrize("file", FILES)
def test_an_error_is_raised_where_that_was_asked_for(file: str, whole: bool) -> None:
    """The error is raised, and leaves no hooks, modes and stances."""
    every = 2 if file.startswith(("capture", "step", "monitor")) else 8  # rules fail in one place
    for _, boundary, name in in_file(file, every * (1 if whole else 5)):
        error = Fault(REASON)
        trial = with_fault(error, boundary, name, "raise")
        # A rerun of the user's module may fail, and a second attempt may succeed.
        passed = trial.told or readings(trial) == readings(unharmed(name))
        assert trial.raised is error or passed, f"{boundary}: {trial.raised!r}"


@pytest.mark.slow(one_in=12, first=2)
@pytest.mark.parametrize("file", FILES)
def test_an_interrupt_leaves_nothing_behind(file: str, whole: bool) -> None:
    """Ctrl-C reaches the training; after the end of the `with`, all hooks and modes are gone."""
    for _, boundary, name in in_file(file, 8 if whole else 40):
        interrupt = KeyboardInterrupt()
        assert with_fault(interrupt, boundary, name, "warn").raised is interrupt


def test_the_scenarios_reach_every_rule_and_every_file() -> None:
    boundaries = {(b.file, b.line) for b in scenario_of()}
    rules = [*uses._RULES.values(), *(rule.function for rule in registry._RULES.values())]
    for rule in rules:
        code = getattr(rule, "func", rule).__code__  # a partial has its function's
        file = code.co_filename
        if file.startswith(str(HOME)):
            place = (str(Path(file).relative_to(HOME)), code.co_firstlineno)
            assert place in boundaries, f"no scenario reaches {rule}"
    assert {file for file in FILES if not list(in_file(file))} == set()
    assert unmonitored("mlp") != unmonitored("mlp", 1), "another training is no equal one"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_guard_runs_nothing_after_a_failure(error: type[BaseException]) -> None:
    """What a step measures rests on all that its hooks have seen."""
    guard, ran = Guard(lambda _: None), list[int]()

    def fails() -> None:
        raise error

    with suppress(KeyboardInterrupt):
        guard(fails)
    guard(ran.append, 1)
    assert guard.broken and not ran
