"""`MaxLRScheduler`: factors of each layer's learning rate that follow measured alignments."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from adiv_monitor.alignment.instrument import Alignment
from adiv_monitor.alignment.probe import Probe
from adiv_monitor.capture.hook import Hook
from adiv_monitor.max_lr.exponents import Parametrization
from adiv_monitor.max_lr.model import ModelNetwork, Ratios, clipped, ratios_of
from adiv_monitor.max_lr.multiplier import parametrization_of
from adiv_monitor.max_lr.optimizers import AnyRule, UpdateRule, rule_of, update_rule
from adiv_monitor.max_lr.schedule.gains import Smoothing, all_finite, factors, usable
from adiv_monitor.max_lr.schedule.safety import LossWatch
from adiv_monitor.max_lr.schedule.steps import ScaledSteps
from adiv_monitor.max_lr.solver import Objective, Status
from adiv_monitor.printable import printable
from adiv_monitor.report import AlignmentReading
from adiv_monitor.step.stepping import is_within_own_step, stepping

Mode = Literal["monitor", "static", "dynamic"]
_HOLD = 5  # readings


@dataclass(frozen=True)
class MaxLRReading:
    """A reading of the alignments after a step, and its solution.

    Attributes:
        step: optimizer steps taken.
        alignment: readings by layer.
        status: status of the solution; "skipped" if a reading was not finite.
        c: solved exponents by layer; empty unless the status is "optimal".
        proposed: smoothed factors of the learning rate.
    """

    step: int
    alignment: Mapping[str, AlignmentReading]
    status: Status | Literal["skipped"]
    c: Mapping[str, float] = field(default_factory=dict)
    proposed: Mapping[str, float] = field(default_factory=dict)


# Names of a layer's weight, or of the parameters from which it is computed.
_OF_LAYERS = (
    *("weight", "parametrizations.weight.original"),
    *("parametrizations.weight.original0", "parametrizations.weight.original1"),
)
_OF_RECURRENT = {"input": "weight_ih", "hidden": "weight_hh", "projection": "weight_hr"}


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
        probe: the batch on which alignments are read; the reference point is the model as it is
            now. None with "static".
        mode: see above.
        parametrization: "sp" (how torch's own layers are initialised), "ntk", "mup", "mfp", or
            one of yours; None: that of the model's multipliers, "sp" where it has none.
        rule: how updates grow with width, see `solve_max_lr`; None: that of torch's optimizers.
        every_n_steps: between readings.
        warm_up: no reading before so many steps, nor while the learning rate rises: alignments
            of the first steps are far below what they come to be.
        freeze_at: the step from which factors stay as they are, such as the beginning of the decay.
        objective: of `solve_max_lr`.
        epsilon: of `solve_max_lr`.
        beta: share of the logarithm of a factor that stays at each reading.
        cap: the largest factor up and down.
        limit: the largest change of a factor from one reading to the next.
        clip: keep alpha and u within [½, 1], omega within [0, 1].
        normalise: divide factors by their geometric mean: only ratios between layers change.
        compensate_decay: divide weight decay by the factor, where decay is rate × decay, so that a
            larger rate does not raise it.
        gains: layer → factor, for "static".

    Raises:
        AdivError, ValueError, TypeError: what can't be worked with; while training it never raises.
        ImportError: without scipy (pip install "adiv-monitor[lr]").

    Attributes:
        gains: layer → the factor in force.
        proposed: layer → the factor that "dynamic" would have in force.
        latest: the last reading; None before the first.
        failures: readings that gave nothing: no solution, values that are not finite, errors.
        step: optimizer steps so far.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        probe: Probe | None,
        *,
        mode: Mode = "monitor",
        parametrization: str | Parametrization | None = None,
        rule: AnyRule | None = None,
        every_n_steps: int = 25,
        warm_up: int = 100,
        freeze_at: int | None = None,
        objective: Objective = "pareto",
        epsilon: float = 0.0,
        beta: float = 0.8,
        cap: float = 8.0,
        limit: float = 1.25,
        clip: bool = True,
        normalise: bool = False,
        compensate_decay: bool = True,
        gains: Mapping[str, float] | None = None,
    ) -> None:
        followed = stepping(optimizer)
        _check(followed, probe, mode, every_n_steps, warm_up, freeze_at, gains)
        assert followed is not None
        self._optimizer = followed
        self._mode = mode
        self._every = every_n_steps
        self._warm_up = warm_up
        self._freeze_at = math.inf if freeze_at is None else freeze_at
        self._options = {"objective": objective, "epsilon": epsilon}
        self._smoothing = Smoothing(beta, cap, limit)
        self._clip, self._normalise = clip, normalise
        self.step = self.failures = 0
        self.latest: MaxLRReading | None = None
        self._losses = LossWatch()
        self._held_until = 0
        self._last_lr, self._rises = -math.inf, False
        self._warned: set[str] = set()
        self._known: dict[str, Ratios] = {}
        alignment = None if mode == "static" or probe is None else Alignment(model, probe)
        self._alignment = alignment
        self.gains: dict[str, float] = dict(gains or {})
        self._log: dict[str, float] = {}
        if alignment is None:
            owners = _parameters_of(model, self.gains)
        else:
            update = rule_of(followed) if rule is None else update_rule(rule)
            _check_groups(followed, update)
            chosen = parametrization or parametrization_of(model) or "sp"
            self._network = ModelNetwork.of(alignment.layers, chosen, update)
            self._network.check_is_applied(chosen)
            full = self._network.solve({}, **self._options)
            if full.status != "optimal":
                raise ValueError(f"MaxLRScheduler: {full.status}: {full.message}")
            self.c_full = dict(zip(self._network.paths, full.c_full, strict=True))
            self._reset()
            owners = {id(p): x.path for x in self._network.layers for p in x.parameters}
        self._scaled = ScaledSteps(followed, owners, compensate_decay=compensate_decay)
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
        return factors(self._log, normalise=self._normalise)

    def see_loss(self, loss: float | Tensor) -> None:
        """Pass the training loss on; if it diverges, all factors are reset to 1.

        A loss diverges if it is not finite, or more than three times its running median. Factors
        then stay 1 for five intervals between readings. Reading a tensor's value waits for the GPU.
        """
        if self._losses.is_astray(float(loss)) and self._mode != "static":
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
            "mode": self._mode,
            "gains": dict(self.gains),
            "log_gains": dict(self._log),
            "c_full": {} if self._alignment is None else dict(self.c_full),
            "known": dict(self._known),
            "held_until": self._held_until,
            "last_lr": self._last_lr,
            "rises": self._rises,
            "losses": list(self._losses.losses),
            "alignment": None if self._alignment is None else self._alignment.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a saved scheduler.

        If the state has no reference point, or one of other layers, all factors begin at 1, and a
        warning says so.
        """
        self.step, self.failures = int(state["step"]), int(state["failures"])
        self._held_until = int(state["held_until"])
        self._last_lr, self._rises = float(state["last_lr"]), bool(state["rises"])
        self._losses.losses.clear()
        self._losses.losses.extend(state["losses"])
        if self._alignment is None:
            self.gains = dict(state["gains"]) if state["mode"] == "static" else self.gains
            return
        try:
            if state["log_gains"].keys() != self._log.keys():
                raise ValueError(f"it has the layers {list(state['log_gains'])}")
            if state.get("alignment") is None:
                raise ValueError("it has no reference point")
            self._alignment.load_state_dict(state["alignment"])
        except (ValueError, KeyError) as error:
            self._reset()
            warnings.warn(
                f"MaxLRScheduler.load_state_dict: factors begin at 1, because of the saved state: "
                f"{printable(str(error))}",
                stacklevel=2,
            )
            return
        self._log = dict(state["log_gains"])
        self._known = {path: tuple(values) for path, values in state["known"].items()}
        self.gains = self.proposed if self._mode == "dynamic" else dict.fromkeys(self._log, 1.0)
        if self._mode == "dynamic" and state["mode"] == "dynamic":
            self.gains = dict(state["gains"])

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
                self.failures += 1
                self._warn(f"{type(error).__name__}: {error}")

    def _is_due(self) -> bool:
        """Whether to read after this step."""
        warm = max(self._warm_up, self._held_until)
        if self._rises or self.step % self._every:
            return False
        return warm <= self.step < self._freeze_at

    def _measure(self, alignment: Alignment) -> None:
        readings = alignment.read()
        ratios = ratios_of(readings)
        if not all_finite(ratios):
            self.failures += 1
            self.latest = MaxLRReading(self.step, readings, "skipped", proposed=self.proposed)
            return
        self._known = usable(ratios, self._known)
        given = clipped(self._known) if self._clip else self._known
        solution = self._network.solve(given, **self._options)
        c = dict(zip(self._network.paths, solution.c, strict=False))
        if solution.status == "optimal":
            for layer, exponent in zip(self._network.layers, solution.gains, strict=True):
                old = self._log[layer.path]
                self._log[layer.path] = self._smoothing.next(old, exponent, layer.width)
            if self._mode == "dynamic":
                self.gains = self.proposed
        else:
            self.failures += 1
            self._warn(f"{solution.status}: {solution.message}")
        self.latest = MaxLRReading(self.step, readings, solution.status, c, self.proposed)

    def _warn(self, what: str) -> None:
        """Warn once per message; the factors stay as they are."""
        if what not in self._warned:
            self._warned.add(what)
            message = f"MaxLRScheduler: step {self.step}: {what}; factors stay"
            warnings.warn(printable(message), stacklevel=2)


def _parameters_of(model: nn.Module, gains: Mapping[str, float]) -> dict[int, str]:
    """Return the layer with a factor that each parameter belongs to, by the parameter's id."""
    owners: dict[int, str] = {}
    names = dict(model.named_parameters(remove_duplicate=False))
    for path, gain in gains.items():
        held = [p for name, p in names.items() if name in _weights_of(path)]
        if not held:
            raise ValueError(
                f"MaxLRScheduler(gains=…): got {path!r}, expected layers such as "
                f"{', '.join(name.removesuffix('.weight') for name in list(names)[:4])}"
            )
        for p in held:
            other = owners.setdefault(id(p), path)
            if gains[other] != gain:
                raise ValueError(
                    f"MaxLRScheduler(gains=…): got {gains[other]:g} for {other!r} and {gain:g} for "
                    f"{path!r}, which share a parameter: expected the same factor"
                )
    return owners


def _weights_of(path: str) -> set[str]:
    """Return the names that the weights of a layer may have in the model.

    "layer@other" is a second use of a layer's weight.
    """
    path = path.partition("@")[0]
    start = f"{path}." if path else ""
    module, _, part = path.rpartition(".")
    within = f"{module}." if module else ""
    names = {path, *(f"{start}{name}" for name in _OF_LAYERS)}
    if part in ("q", "k", "v"):
        names.add(f"{within}in_proj_weight")
    kind, _, suffix = part.partition("_")
    if kind in _OF_RECURRENT:
        names.add(f"{within}{_OF_RECURRENT[kind]}" + f"_{suffix}" * bool(suffix))
    return names


def _check_groups(optimizer: Optimizer, rule: UpdateRule) -> None:
    """Check that groups of `optimizer_groups` are for this rule."""
    given = {str(group["rule"]) for group in optimizer.param_groups if "rule" in group}
    if given - {rule.name}:
        raise ValueError(
            f"MaxLRScheduler(optimizer=…): it has groups of {min(given)!r}, and the rule of "
            f"{type(optimizer).__name__} is {rule.name!r}: expected optimizer_groups(…, "
            f"{rule.name!r}), or rule={min(given)!r}"
        )


def _check(
    optimizer: object,
    probe: object,
    mode: str,
    every_n_steps: int,
    warm_up: int,
    freeze_at: int | None,
    gains: Mapping[str, float] | None,
) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"MaxLRScheduler(optimizer=…): got {type(optimizer).__name__}, expected a "
            "torch.optim.Optimizer"
        )
    if mode not in get_args(Mode):
        raise ValueError(f"MaxLRScheduler(mode=…): got {mode!r}, expected one of {get_args(Mode)}")
    if (mode == "static") != (gains is not None):
        raise ValueError(
            f"MaxLRScheduler(mode={mode!r}, gains={gains!r}): expected gains with 'static', and "
            "only then: the `proposed` of another run"
        )
    if gains is not None and not all(math.isfinite(m) and m > 0 for m in gains.values()):
        raise ValueError(f"MaxLRScheduler(gains=…): got {dict(gains)}, expected factors above 0")
    if mode != "static" and not isinstance(probe, Probe):
        raise TypeError(f"MaxLRScheduler(probe=…): got {type(probe).__name__}, expected a Probe")
    for name, value, least in (
        ("every_n_steps", every_n_steps, 1),
        ("warm_up", warm_up, 0),
        ("freeze_at", 0 if freeze_at is None else freeze_at, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(
                f"MaxLRScheduler({name}=…): got {value!r}, expected an integer of at least {least}"
            )
