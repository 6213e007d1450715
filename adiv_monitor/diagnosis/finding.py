"""What the audit says: findings with their evidence, advice, and what trying the advice gave."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, NamedTuple

Strength = Literal["act", "watch", "note"]
STRENGTHS: tuple[Strength, ...] = ("act", "watch", "note")  # strongest first
# Findings that are so, whatever a short run gives. A learning rate fixes no wiring.
WIRING = frozenset(
    {
        *("not-held", "unreached", "frozen", "input-ignored"),
        *("hidden-parameters", "rate-zero", "broadcast-loss", "softmax-of-one", "no-log"),
        *("future-leak", "target-is-input", "softmax-over-samples", "same-batch", "unshuffled"),
    }
)
# Facts whose harm depends: to be watched, unless the run suffers, or a fix of theirs helps and
# leaves less than this share of the loss: without dropout a loss is always lower.
IF_A_FIX_HELPS: Mapping[str, float] = MappingProxyType(
    {
        "rounded-away": 1.0,
        "gradient-hooks": 1.0,
        "left-in-eval": 1.0,
        "batch-norm-starved": 1.0,
        "dropout-too-high": 0.5,
        "targets-out-of-range": 1.0,
        "one-sided-weights": 1.0,
        "bounded-logits": 1.0,
        "samples-mixed": 1.0,
        "reshape-scrambles": 1.0,
        "gradient-cut": 0.95,
        "input-partly-ignored": 1.0,
        "order-ignored": 0.8,
    }
)
# Of these, what is meant as often as not: a note, where a fix of it was tried and does not help.
ELSE_A_NOTE = frozenset({"order-ignored"})
# Learning rates below and above the run's own, by the names of their trials.
LOWER_RATES = ("rate*0.01", "rate*0.1", "rate*0.3")
HIGHER_RATES = ("rate*3", *(f"rate*{10.0**n:g}" for n in range(1, 10)))
RATES = (*LOWER_RATES, *HIGHER_RATES)

Mark = Literal["✓", "✗", "→"]
NO_STEPS = "the steps for trials were used up"
NO_TIME = "no time was left"
_LEAST = 0.02  # of a loss, by which another must be lower to count


@dataclass(frozen=True)
class Evidence:
    """One number that speaks for a finding.

    Attributes:
        measure: its name: a measure of the monitor, or what else was recorded ("loss", …).
        value: what was read.
        limit: the threshold that it was held against; None where there is none.
        layer: the layer, or module, that it was read at; None: the whole model.
        step: the step that it was read at; None: over the whole run.
    """

    measure: str
    value: float
    limit: float | None = None
    layer: str | None = None
    step: int | None = None


@dataclass(frozen=True)
class Trial:
    """What a fix did to the loss in a short run from the same weights on the same batches.

    Attributes:
        fix: the fix's name.
        steps: steps of each run.
        loss: the mean loss of the last quarter of the steps, with the fix; infinite where it
            diverged: it stopped being finite, or ended a thousand times above where it began.
        loss_without: the same as the model is.
        loss_by_rate: the same with only the best of the learning rates that were tried; None where
            none was. What a learning rate would fix is no merit of another fix.
        error: standard error of `loss_without - loss`, over the same steps; NaN where one of the
            runs diverged.
        loss_error: of `loss` alone.
        error_by_rate: of `loss_by_rate - loss`, as of runs that share no batches.
        rate: factor on the learning rate that the fix was the best with, of those it was tried
            with; 1: as it is.
        runs: with how many learning rates it was tried.
        falls: of overfitting one batch only: whether the loss was still falling at the end.
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
        without = "" if math.isinf(self.loss_without) else f" instead of {self.loss_without:.3g}"
        if math.isinf(self.loss):
            as_it_is = " as it does without" if math.isinf(self.loss_without) else without
            return f"{rate}the loss diverges within {self.steps} steps{as_it_is}"
        error = f" (± {self.error:.1g})" if self.error > 0 else ""
        without = without or ", which diverges without"
        return f"{rate}loss after {self.steps} steps {self.loss:.3g}{without}{error}"

    @property
    def gain(self) -> float:
        """How much lower the loss is with the fix."""
        if math.isinf(self.loss):
            return -math.inf
        return self.loss_without - self.loss

    @property
    def pays(self) -> bool:
        """Whether the loss is lower by more than two standard errors and by 2 % of itself."""
        if not math.isfinite(self.loss_without):
            return math.isfinite(self.loss)
        return self.gain > max(2 * self.error, _LEAST * abs(self.loss_without))

    @property
    def beats_rate(self) -> bool:
        """Whether the loss is also lower than with another learning rate alone.

        By 2 %, and by more than two standard errors: those of `loss_without - loss`, over the same
        steps, stand for those of this difference, unless the run as it is was so wild that they are
        larger than `error_by_rate`. Where it diverged, the 2 % alone decide.
        """
        if self.loss_by_rate is None or not math.isfinite(self.loss_by_rate):
            return math.isfinite(self.loss)
        error = 0.0 if math.isnan(self.error) else self.error
        if self.error_by_rate < error:
            error = self.error_by_rate
        return self.loss_by_rate - self.loss > max(2 * error, _LEAST * abs(self.loss_by_rate))

    @property
    def beats_constant(self) -> bool:
        """Whether the loss is below that of a constant prediction, where that is known.

        By 2 % of that, and by more than two standard errors of `loss`, where they are known.
        """
        if self.constant is None:
            return math.isfinite(self.loss)
        error = 0.0 if math.isnan(self.loss_error) else self.loss_error
        return self.constant - self.loss > max(2 * error, _LEAST * abs(self.constant))

    @property
    def helps(self) -> bool:
        """Whether it is a fix: it pays, and beats a constant prediction.

        Unless it is a learning rate itself, it must beat another learning rate alone as well.
        """
        is_rate = self.fix.startswith("rate*")
        return self.pays and self.beats_constant and (is_rate or self.beats_rate)

    @property
    def objection(self) -> str:
        """Why it is no fix, in a few words; "" where it is one."""
        if self.helps:
            return ""
        if math.isinf(self.loss):
            return "it diverges"
        if not self.pays:
            return "the loss is not lower by more than its error and 2 %"
        if not self.beats_constant:
            return f"no better than a constant prediction ({self.constant:.3g})"
        return f"no better than another learning rate alone ({self.loss_by_rate:.3g})"


class Outcome(NamedTuple):
    """What came of an advice.

    Attributes:
        mark: ✓: tried, and it helps; ✗: tried, and it does not; →: not tried.
        words: the numbers that say so, or why it was not tried.
    """

    mark: Mark
    words: str


def outcome(trial: Trial | None, untried: str = "") -> Outcome:
    """The mark and the words of a trial, or of none, wherever people read of it.

    Args:
        trial: what was tried; None: nothing.
        untried: why not.
    """
    if trial is None:
        return Outcome("→", f"not tried: {untried}" if untried else "not tried")
    if trial.helps:
        by_rate = math.inf if trial.loss_by_rate is None else trial.loss_by_rate
        # Where the run as it is does better, that comparison says it already.
        is_beside = by_rate < trial.loss_without
        alone = f"; another learning rate alone gives {by_rate:.3g}" * is_beside
        return Outcome("✓", f"{trial}{alone}")
    if math.isinf(trial.loss):
        return Outcome("✗", f"{trial}")
    why = trial.objection if trial.pays else "which does not help"
    return Outcome("✗", f"{trial}, {why}")


@dataclass(frozen=True)
class Advice:
    """What would fix it.

    Attributes:
        text: what to do, in plain words.
        fix: name of the fix that a short run can try (see `trials.fixes`); None: none can.
        trial: what that gave; None: not tried.
        untried: why the fix was not tried; "" if it was, or if there is none.
        everywhere: the fix is for all layers, wherever what is wrong shows.
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
        """The mark and the words of what came of it."""
        only_you = "no short run can do it" if self.fix is None else ""
        return outcome(self.trial, self.untried or only_you)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a training run, or worth knowing.

    Attributes:
        name: stable, e.g. "input-scale"; each has its page in the docs.
        layers: the layers that it is about, worst first; empty: the whole model.
        strength: "act": it costs training, fix it; "watch": it may; "note": good to know.
        evidence: the numbers that say so.
        advice: what would fix it, the best first.
        summary: one sentence in plain words.
        not_advised: what looks like a fix and is none, in one sentence; "" if nothing.
        against: names of the fixes that `not_advised` speaks against.
        since: the first measured step at which it showed.
    """

    name: str
    layers: tuple[str, ...]
    strength: Strength
    evidence: tuple[Evidence, ...]
    advice: tuple[Advice, ...]
    summary: str = ""
    not_advised: str = ""
    since: int | None = None
    against: tuple[str, ...] = ()

    def layers_for(self, advice: Advice) -> tuple[str, ...]:
        """The layers that an advice is for; empty: all, and so is a learning rate."""
        is_rate = (advice.fix or "").startswith("rate*")
        return () if advice.everywhere or is_rate else self.layers


def unrefuted(finding: Finding, trials: Iterable[Trial]) -> Finding:
    """The finding without what it says would not help, where a trial of just that paid."""
    paid = {trial.fix for trial in trials if trial.pays}
    return replace(finding, not_advised="", against=()) if paid & {*finding.against} else finding
