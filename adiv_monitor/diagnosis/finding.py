"""Findings with their evidence and advice, and the trials of that advice."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Strength = Literal["act", "watch", "note"]
STRENGTHS: tuple[Strength, ...] = ("act", "watch", "note")  # strongest first
# Learning rates below and above the run's own, by the names of their trials.
LOWER_RATES = ("rate*0.001", "rate*0.01", "rate*0.1", "rate*0.3")
HIGHER_RATES = ("rate*3", *(f"rate*{10.0**n:g}" for n in range(1, 10)))
RATES = (*LOWER_RATES, *HIGHER_RATES)


def act_if(harms: object) -> Strength:
    """Return "act" if the condition holds, else "watch"."""
    return "act" if harms else "watch"


Mark = Literal["✓", "✗", "→"]
NO_STEPS = "the steps for trials were used up"
_MOST_RED = 10
_LEAST = 0.02  # smallest relative decrease of a loss that counts
FAR_BELOW = 100.0  # times a loss, or times 1 if that is larger: so far below zero it has no bound


@dataclass(frozen=True)
class Evidence:
    """One number that is evidence of a finding.

    Attributes:
        measure: name of a measure of the monitor, or of another recorded number ("loss", …).
        value: value of the measure.
        limit: threshold that the value was compared with; None: there is none.
        layer: layer or module of the value; None: the whole model.
        step: step of the value; None: the whole run.
    """

    measure: str
    value: float
    limit: float | None = None
    layer: str | None = None
    step: int | None = None


@dataclass(frozen=True)
class Trial:
    """The effect of a fix on the loss in a short run from the same weights on the same batches.

    Attributes:
        fix: name of the fix.
        steps: number of steps of each run.
        loss: mean loss of the last quarter of the steps, with the fix; infinite if it diverged: it
            stopped being finite, or ended a thousand times above its start.
        loss_without: the same loss without the fix.
        loss_by_rate: the same loss with only the best of the learning rates that were tried; None:
            none was tried. An effect that a learning rate achieves does not count for another fix.
        error: standard error of `loss_without - loss`, over the same steps; NaN if one of the runs
            diverged.
        loss_error: standard error of `loss` alone.
        error_by_rate: standard error of `loss_by_rate - loss`, as for runs that share no batches.
        rate: factor on the learning rate with which the fix was best, among those tried; 1:
            unchanged.
        runs: number of learning rates that the fix was tried with.
        falls: for overfitting one batch only: whether the loss was still falling at the end.
        constant: the loss of a constant prediction; None: not known, or the loss need not fall.
    """

    fix: str
    steps: int
    loss: float
    loss_without: float
    loss_by_rate: float | None
    error: float
    rate: float = 1.0
    runs: int = 1
    falls: bool = False
    loss_error: float = math.nan
    error_by_rate: float = math.nan
    constant: float | None = None

    def __str__(self) -> str:
        rate = "" if self.rate == 1 else f"with learning rate × {self.rate:g}, "
        length, without = f"{self.steps} step{'s' * (self.steps != 1)}", " instead of diverging"
        if not math.isinf(self.loss_without):
            without = f" instead of {self.loss_without:.3g}"
        if math.isinf(self.loss):
            as_it_is = ", as without the fix" if math.isinf(self.loss_without) else without
            return f"{rate}the loss diverges within {length}{as_it_is}"
        error = f" (± {self.error:.1g})" if self.error > 0 else ""
        return f"{rate}loss after {length} {self.loss:.3g}{without}{error}"

    @property
    def gain(self) -> float:
        """Decrease of the loss by the fix."""
        return -math.inf if math.isinf(self.loss) else self.loss_without - self.loss

    @property
    def runs_away(self) -> bool:
        """Whether the loss is so far below zero that it has no lower bound: that is no gain."""
        without = abs(self.loss_without) if math.isfinite(self.loss_without) else 0.0
        return self.loss < -FAR_BELOW * max(1.0, without)

    @property
    def pays(self) -> bool:
        """Whether the loss is lower by more than two standard errors and by 2 %, and has a bound.

        Where the run without the fix ends above a constant prediction, and the run with it below,
        by `beats_constant`, 2 % are enough: a loss that jumps up and down has large errors.
        """
        if self.runs_away:
            return False
        if not math.isfinite(self.loss_without):
            return math.isfinite(self.loss)
        if self.gain <= _LEAST * abs(self.loss_without) or math.isnan(self.error):
            return False
        crosses = self.constant is not None and self.loss_without > self.constant
        return self.gain > 2 * self.error or (crosses and self.beats_constant)

    @property
    def beats_rate(self) -> bool:
        """Whether the loss is also lower than with another learning rate alone.

        It must be lower by 2 %, and by more than two standard errors. The standard error of
        `loss_without - loss`, over the same steps, is used for this difference, unless the run
        without the fix was so noisy that it exceeds `error_by_rate`. If that run diverged, only the
        2 % count.
        """
        return self._is_below(self.loss_by_rate, 2 * min(self.error, self.error_by_rate))

    @property
    def beats_constant(self) -> bool:
        """Whether the loss is below that of a constant prediction, if that is known.

        It must be lower by 2 %, and by more than the standard error of `loss`, if it is known: the
        run itself is beaten by two of them, and a constant prediction is no run with noise.
        """
        return self._is_below(self.constant, self.loss_error)

    def _is_below(self, other: float | None, error: float) -> bool:
        if other is None or not math.isfinite(other):
            return math.isfinite(self.loss)
        error = 0.0 if math.isnan(error) else error  # not known
        return other - self.loss > max(error, _LEAST * abs(other))

    @property
    def helps(self) -> bool:
        """Whether the trial shows an improvement: it pays, and beats a constant prediction.

        Unless the fix is a learning rate itself, it must also beat another learning rate alone.
        """
        by_itself = self.fix.startswith("rate*") or self.beats_rate
        return self.pays and self.beats_constant and by_itself

    @property
    def objection(self) -> str:
        """The reason why the fix does not help, in a few words; "" if it helps."""
        if self.helps:
            return ""
        if math.isinf(self.loss):
            return "it diverges"
        if self.runs_away:
            return "the loss falls without bound"
        if not self.pays:
            return "the loss is not lower by more than two standard errors and 2 %"
        if not self.beats_constant:
            return f"no better than a constant prediction ({self.constant:.3g})"
        return f"no better than another learning rate alone ({self.loss_by_rate:.3g})"


class Outcome(NamedTuple):
    """The outcome of an advice.

    Attributes:
        mark: ✓: tried, and it helps; ✗: tried, and it does not; →: not tried.
        words: the numbers of the trial, or the reason why it was not tried.
    """

    mark: Mark
    words: str


@dataclass(frozen=True)
class Advice:
    """A suggested fix of a finding.

    Attributes:
        text: the action, in plain words.
        fix: name of the fix that a short run can try (see `trials.fixes`); None: none can.
        trial: trial of the fix; None: not tried.
        untried: reason why the fix was not tried; "" if it was, or if there is none.
        everywhere: whether the fix is for all layers, wherever the fault shows.
    """

    text: str
    fix: str | None = None
    trial: Trial | None = None
    untried: str = ""
    everywhere: bool = False

    def __str__(self) -> str:
        words = self.outcome.words
        return f"{self.text} ({words})" if self.trial is None else f"{self.text}: {words}"

    @property
    def outcome(self) -> Outcome:
        """Mark and words of the outcome of this advice."""
        trial = self.trial
        if trial is None:
            why = self.untried or "the audit can't do this itself" * (self.fix is None)
            return Outcome("→", f"not tried: {why}" if why else "not tried")
        if not trial.helps:
            why = trial.objection if trial.pays else "which does not help"
            return Outcome("✗", f"{trial}" if math.isinf(trial.loss) else f"{trial}, {why}")
        by_rate = math.inf if trial.loss_by_rate is None else trial.loss_by_rate
        # If the run without the fix is better than by_rate, the comparison is already in the text.
        alone = f"; another learning rate alone gives {by_rate:.3g}"
        return Outcome("✓", f"{trial}{alone * (by_rate < trial.loss_without)}")


@dataclass(frozen=True)
class Finding:
    """A fault of a training run, or a fact worth knowing.

    Attributes:
        name: stable name, e.g. "input-scale"; each has its page in the docs.
        strength: "act": it harms the training, fix it; "watch": it may; "note": good to know.
        summary: one sentence in plain words.
        evidence: the numbers that support the finding.
        advice: suggested fixes, the best first.
        not_advised: an apparent fix that would not help, in one sentence; "" if there is none.
        layers: affected layers, worst first; empty: the whole model.
        since: first measured step that shows the finding.
        against: names of the fixes that `not_advised` is about; empty without it.
    """

    name: str
    strength: Strength
    summary: str = ""
    evidence: tuple[Evidence, ...] = ()
    advice: tuple[Advice, ...] = ()
    not_advised: str = ""
    layers: tuple[str, ...] = ()
    since: int | None = None
    against: tuple[str, ...] = RATES

    def __post_init__(self) -> None:
        if not self.not_advised:
            object.__setattr__(self, "against", ())

    def layers_for(self, advice: Advice) -> tuple[str, ...]:
        """Return the layers that an advice is for; empty: all, as for a learning rate."""
        is_rate = (advice.fix or "").startswith("rate*")
        return () if advice.everywhere or is_rate else self.layers


def red_layers(findings: Iterable[Finding]) -> set[str]:
    """Return the worst layers of findings to act on or to watch, whose names pictures draw in red.

    At most ten, by the order of the findings: where all names are red, none stands out.
    """
    named = dict.fromkeys(layer for f in findings if f.strength != "note" for layer in f.layers)
    return set([*named][:_MOST_RED])


def unrefuted(finding: Finding, trials: Iterable[Trial]) -> Finding:
    """Remove `not_advised` from a finding if a trial of one of these fixes paid."""
    paid = {trial.fix for trial in trials if trial.pays}
    return replace(finding, not_advised="") if paid & {*finding.against} else finding
