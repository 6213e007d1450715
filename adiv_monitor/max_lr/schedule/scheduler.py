"""`MaxLRScheduler`: factors of each layer's learning rate that follow measured alignments."""

import math
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from adiv_monitor.alignment.instrument import Alignment
from adiv_monitor.alignment.probe import Probe
from adiv_monitor.capture.hook import Hook
from adiv_monitor.max_lr.exponents import Parametrization
from adiv_monitor.max_lr.groups import owners_of
from adiv_monitor.max_lr.model import ModelNetwork, Ratios, clipped, ratios_of
from adiv_monitor.max_lr.multiplier import parametrization_of
from adiv_monitor.max_lr.optimizers import AnyRule, UpdateRule, update_rule
from adiv_monitor.max_lr.schedule.steps import ScaledSteps
from adiv_monitor.max_lr.solver import Objective, Status
from adiv_monitor.printable import printable
from adiv_monitor.report import AlignmentReading
from adiv_monitor.step.stepping import is_within_own_step, stepping

Mode = Literal["monitor", "static", "dynamic"]
_HOLD = 5  # readings without factors after a loss that diverged
_REMEMBERED, _ENOUGH, _ASTRAY = 100, 10, 3.0  # losses, for their median; and times the median


@dataclass(frozen=True)
class MaxLRReading:
    """A reading of the alignments after a step, and its solution.

    Attributes:
        step: optimizer steps taken.
        alignment: readings by layer.
        status: status of the solution.
        c: solved exponents by layer; empty unless the status is "optimal".
        proposed: smoothed factors of the learning rate.
    """

    step: int
    alignment: Mapping[str, AlignmentReading]
    status: Status
    c: Mapping[str, float] = field(default_factory=dict)
    proposed: Mapping[str, float] = field(default_factory=dict)


class MaxLRScheduler:
    """Multiplies each layer's learning rate by m = n^(c_full − c), as far as alignments allow.

    c follows from alignments that are measured every `every_n_steps` steps, c_full from full
    alignment; without a measured difference all factors stay 1. Other schedulers still set the
    rates. The rates are multiplied when the optimizer's step begins and restored when it ends, so
    no scheduler sees the factors. Steps are optimizer steps.

    Modes: "monitor" (default) only reports the factors (`proposed`); "dynamic" applies them;
    "static" applies the factors of another, short run (`gains`) and measures nothing.

    Args:
        optimizer: the optimizer whose steps are scaled.
        model: the model that it trains.
        probe: the batch that shows the layers, and on which alignments are read; the reference
            point is the model as it is now.
        mode: see above.
        parametrization: "sp" (how torch's own layers are initialised), "ntk", "mup", "mfp", or
            one of yours; None: that of the model's multipliers, "sp" where it has none.
        rule: how updates grow with width, see `solve_max_lr`; None: that of torch's optimizers.
        every_n_steps: between readings.
        warm_up: no reading before so many steps, nor while the learning rate rises: alignments
            of the first steps are far below what they come to be.
        freeze_at: the step from which factors stay as they are, such as the beginning of the decay.
        objective: of `solve_max_lr`.
        beta: share of the logarithm of a factor that stays at each reading.
        cap: the largest factor up and down.
        limit: the largest change of a factor from one reading to the next.
        gains: layer → factor, for "static".

    Raises:
        AdivError, ValueError, TypeError: what can't be worked with; while training it never raises.
        ImportError: without scipy (pip install "adiv-monitor[lr]").

    Attributes:
        gains: layer → the factor in force.
        proposed: layer → the factor that "dynamic" would have in force.
        latest: the last reading; None before the first.
        failures: readings that gave nothing: no solution, errors.
        step: optimizer steps so far.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        probe: Probe,
        *,
        mode: Mode = "monitor",
        parametrization: str | Parametrization | None = None,
        rule: AnyRule | None = None,
        every_n_steps: int = 25,
        warm_up: int = 100,
        freeze_at: int | None = None,
        objective: Objective = "pareto",
        beta: float = 0.8,
        cap: float = 8.0,
        limit: float = 1.25,
        gains: Mapping[str, float] | None = None,
    ) -> None:
        followed = stepping(optimizer)
        if not isinstance(followed, Optimizer):
            raise TypeError(
                f"MaxLRScheduler(optimizer=…): got {type(followed).__name__}, expected a "
                "torch.optim.Optimizer"
            )
        _check(mode, gains)
        _check_numbers(every_n_steps=(every_n_steps, 1), warm_up=(warm_up, 0))
        _check_numbers(freeze_at=(freeze_at or 0, 0), cap=(cap, 1.0), limit=(limit, 1.0))
        if not 0 <= beta < 1:
            raise ValueError(f"MaxLRScheduler(beta=…): got {beta}, expected a share below 1")
        self._mode = mode
        self._every = every_n_steps
        self._warm_up = warm_up
        self._freeze_at = math.inf if freeze_at is None else freeze_at
        self._objective = objective
        self._beta, self._cap, self._limit = beta, math.log(cap), math.log(limit)
        self.step = self.failures = 0
        self.latest: MaxLRReading | None = None
        self._losses: deque[float] = deque(maxlen=_REMEMBERED)
        self._held_until = 0
        self._last_lr, self._rises = -math.inf, False
        self._warned: set[str] = set()
        self._known: dict[str, Ratios] = {}
        alignment = Alignment(model, probe)
        layers = alignment.layers
        self._alignment = None if mode == "static" else alignment
        self.gains: dict[str, float] = dict(gains or {})
        self._log: dict[str, float] = {}
        if self._alignment is not None:
            update = update_rule(rule or followed)
            _check_groups(followed, update)
            chosen = parametrization or parametrization_of(model) or "sp"
            self._network = ModelNetwork.of(layers, chosen, update)
            full = self._network.solve({}, objective=objective)
            if full.status != "optimal":
                raise ValueError(f"MaxLRScheduler: {full.status}: {full.message}")
            self.c_full = dict(zip(self._network.paths, full.c_full, strict=True))
            layers = self._network.layers
            self._reset()
        owners = owners_of("MaxLRScheduler", layers, self.gains)
        self._scaled = ScaledSteps(followed, owners)
        if mode != "monitor":
            self._scaled.claim()
        before, after = map(torch.compiler.disable, (self._before_step, self._after_step))
        self._handles: list[RemovableHandle] = [
            followed.register_step_pre_hook(Hook(before)),
            followed.register_step_post_hook(Hook(after)),
        ]

    @property
    def proposed(self) -> dict[str, float]:
        """Factors by layer that the alignments so far allow."""
        if self._alignment is None:
            return dict(self.gains)
        return {path: math.exp(value) for path, value in self._log.items()}

    def see_loss(self, loss: float | Tensor) -> None:
        """Pass the training loss on; if it diverges, all factors are reset to 1.

        A loss diverges if it is not finite, or more than three times its running median. Factors
        then stay 1 for five intervals between readings. Reading a tensor's value waits for the GPU.
        """
        value = float(loss)
        usual = median(self._losses) if len(self._losses) >= _ENOUGH else math.inf
        if math.isfinite(value) and not value > _ASTRAY * usual > 0:
            self._losses.append(value)
        elif self._mode != "static":
            self._held_until = self.step + _HOLD * self._every
            self._reset()

    def close(self) -> None:
        """Remove the hooks from the optimizer; a second call does nothing."""
        self._scaled.close()
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return all state that a resumed run needs to continue without a difference."""
        return {
            "step": self.step,
            "failures": self.failures,
            "log_gains": dict(self._log),
            "known": dict(self._known),
            "held_until": self._held_until,
            "last_lr": self._last_lr,
            "rises": self._rises,
            "losses": list(self._losses),
            "alignment": None if self._alignment is None else self._alignment.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a saved scheduler.

        If the state has no reference point, or one of other layers, all factors begin at 1, and a
        warning says so. With "static" the factors stay.
        """
        self.step, self.failures = int(state["step"]), int(state["failures"])
        self._held_until = int(state["held_until"])
        self._last_lr, self._rises = float(state["last_lr"]), bool(state["rises"])
        self._losses = deque(state["losses"], _REMEMBERED)
        if self._alignment is None:
            return
        self._reset()
        try:
            if state["log_gains"].keys() != self._log.keys():
                raise ValueError(f"it has the layers {list(state['log_gains'])}")
            if state["alignment"] is None:
                raise ValueError("it has no reference point")
            self._alignment.load_state_dict(state["alignment"])
        except ValueError as error:
            warnings.warn(
                f"MaxLRScheduler.load_state_dict: factors begin at 1, because of the saved state: "
                f"{printable(str(error))}",
                stacklevel=2,
            )
            return
        self._log = dict(state["log_gains"])
        self._known = {path: tuple(values) for path, values in state["known"].items()}
        if self._mode == "dynamic":
            self.gains = self.proposed

    def _reset(self) -> None:
        self._log = dict.fromkeys(self._network.paths, 0.0)
        self.gains = dict.fromkeys(self._network.paths, 1.0)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not is_within_own_step(optimizer):
            self._scaled.begin({} if self._mode == "monitor" else self.gains)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_within_own_step(optimizer):
            return
        self._scaled.end()
        rate = max(float(group["lr"]) for group in optimizer.param_groups)
        self._rises, self._last_lr = rate > self._last_lr > -math.inf, rate
        self.step += 1
        if self._alignment is not None and self._is_due():
            try:
                self._measure(self._alignment)
            except Exception as error:
                self._failed(f"{type(error).__name__}: {error}")

    def _is_due(self) -> bool:
        """Whether to read after this step."""
        warm = max(self._warm_up, self._held_until)
        if self._rises or self.step % self._every:
            return False
        return warm <= self.step < self._freeze_at

    def _measure(self, alignment: Alignment) -> None:
        readings = alignment.read()
        for path, ratios in ratios_of(readings).items():
            # A ratio that is undefined keeps its previous value.
            known = zip(ratios, self._known.get(path, (None,) * 3), strict=True)
            self._known[path] = tuple(b if a is None else a for a, b in known)  # type: ignore[assignment]
        solution = self._network.solve(clipped(self._known), objective=self._objective)
        c = dict(zip(self._network.paths, solution.c, strict=False))
        if solution.status == "optimal":
            for layer, exponent in zip(self._network.layers, solution.gains, strict=True):
                self._log[layer.path] = self._next(self._log[layer.path], exponent, layer.width)
            if self._mode == "dynamic":
                self.gains = self.proposed
        else:
            self._failed(f"{solution.status}: {solution.message}")
        self.latest = MaxLRReading(self.step, readings, solution.status, c, self.proposed)

    def _next(self, log_gain: float, exponent: float, width: int) -> float:
        """Return log m ← β log m + (1 − β) clip((c_full − c) log n), changed by at most the limit.

        Args:
            log_gain: the current log m.
            exponent: c_full − c.
            width: n of the layer.
        """
        target = min(max(exponent * math.log(width), -self._cap), self._cap)
        new = self._beta * log_gain + (1 - self._beta) * target
        return min(max(new, log_gain - self._limit), log_gain + self._limit)

    def _failed(self, what: str) -> None:
        """Count a reading that gave nothing, and warn once per message; the factors stay."""
        self.failures += 1
        if what not in self._warned:
            self._warned.add(what)
            message = f"MaxLRScheduler: step {self.step}: {what}; factors stay"
            warnings.warn(printable(message), stacklevel=2)


def _check_groups(optimizer: Optimizer, rule: UpdateRule) -> None:
    """Check that groups of `optimizer_groups` are for this rule."""
    given = {str(group["rule"]) for group in optimizer.param_groups if "rule" in group}
    if given - {rule.name}:
        raise ValueError(
            f"MaxLRScheduler(optimizer=…): it has groups of {min(given)!r}, and the rule of "
            f"{type(optimizer).__name__} is {rule.name!r}: expected optimizer_groups(…, "
            f"{rule.name!r}), or rule={min(given)!r}"
        )


def _check(mode: str, gains: Mapping[str, float] | None) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"MaxLRScheduler(mode=…): got {mode!r}, expected one of {get_args(Mode)}")
    if (mode == "static") != (gains is not None):
        raise ValueError(
            f"MaxLRScheduler(mode={mode!r}, gains={gains!r}): expected gains with 'static', and "
            "only then: the `proposed` of another run"
        )
    if gains is not None and not all(math.isfinite(m) and m > 0 for m in gains.values()):
        raise ValueError(f"MaxLRScheduler(gains=…): got {dict(gains)}, expected factors above 0")


def _check_numbers(**given: tuple[float, float]) -> None:
    """Check that each value is finite, of at least so much, and whole if the least is."""
    for name, (value, least) in given.items():
        kinds = int if isinstance(least, int) else int | float
        if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value < math.inf:
            what = "an integer" if kinds is int else "a factor"
            raise ValueError(
                f"MaxLRScheduler({name}=…): got {value!r}, expected {what} of at least {least}"
            )
