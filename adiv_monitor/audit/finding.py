"""What the audit says: findings with their evidence, advice, and what trying the advice gave."""

import math
from dataclasses import dataclass
from typing import Literal

Strength = Literal["act", "watch", "note"]
STRENGTHS: tuple[Strength, ...] = ("act", "watch", "note")  # strongest first
# Findings that are so, whatever a short run gives. A learning rate mends no wiring.
WIRING = frozenset({"not-held", "unreached", "frozen", "input-ignored"})


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
    """What a mend did to the loss in a short run from the same weights on the same batches.

    Attributes:
        mend: the mend's name.
        steps: steps of each run.
        loss: the mean loss of the last quarter of the steps, with the mend; infinite where it
            diverged: it stopped being finite, or ended a thousand times above where it began.
        loss_without: the same as the model is.
        loss_by_rate: the same with only the best of the learning rates that were tried; None where
            none was. What a rate would mend is no merit of another mend.
        error: standard error of `loss_without - loss`, over the same steps; NaN where one of the
            runs diverged.
        loss_error: of `loss` alone.
        error_by_rate: of `loss_by_rate - loss`, as of runs that share no batches.
        rate: factor on the learning rate that the mend was the best with, of those it was tried
            with; 1: as it is.
        runs: with how many learning rates it was tried.
        falls: of learning by heart only: whether the loss was still falling at the end.
    """

    mend: str
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

    def __str__(self) -> str:
        without = "" if math.isinf(self.loss_without) else f" instead of {self.loss_without:.3g}"
        if math.isinf(self.loss):
            as_it_is = " as it does without" if math.isinf(self.loss_without) else without
            return f"the loss diverges within {self.steps} steps{as_it_is}"
        error = f" (± {self.error:.1g})" if self.error > 0 else ""
        without = without or ", which diverges without"
        pays = "" if self.pays else ", which does not pay"
        return f"loss after {self.steps} steps {self.loss:.3g}{without}{error}{pays}"

    @property
    def gain(self) -> float:
        """How much lower the loss is with the mend."""
        if math.isinf(self.loss):
            return -math.inf
        return self.loss_without - self.loss

    @property
    def pays(self) -> bool:
        """Whether the loss is lower by more than two standard errors and by 2 % of itself."""
        if not math.isfinite(self.loss_without):
            return math.isfinite(self.loss)
        return self.gain > max(2 * self.error, 0.02 * abs(self.loss_without))

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
        return self.loss_by_rate - self.loss > max(2 * error, 0.02 * abs(self.loss_by_rate))


@dataclass(frozen=True)
class Advice:
    """What would mend it.

    Attributes:
        text: what to do, in plain words.
        mend: name of the mend that a short run can try (see `trials.mends`); None: none can.
        trial: what that gave; None: not tried.
        untried: why the mend was not tried; "" if it was, or if there is none.
        everywhere: the mend is for all layers, wherever what is wrong shows.
    """

    text: str
    mend: str | None = None
    trial: Trial | None = None
    untried: str = ""
    everywhere: bool = False

    def __str__(self) -> str:
        if self.trial is None:
            return f"{self.text} (not tried{f': {self.untried}' if self.untried else ''})"
        rate = "" if self.trial.rate == 1 else f", learning rate × {self.trial.rate:g}"
        return f"{self.text}{rate}: {self.trial}"


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a training run, or worth knowing.

    Attributes:
        name: stable, e.g. "input-scale"; each has its page in the docs.
        layers: the layers that it is about, worst first; empty: the whole model.
        strength: "act": it costs training, mend it; "watch": it may; "note": good to know.
        evidence: the numbers that say so.
        advice: what would mend it, the best first.
        summary: one sentence in plain words.
        not_advised: what looks like a mend and is none, in one sentence; "" if nothing.
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

    def layers_for(self, advice: Advice) -> tuple[str, ...]:
        """The layers that an advice is for; empty: all, and so is a learning rate."""
        is_rate = (advice.mend or "").startswith("rate*")
        return () if advice.everywhere or is_rate else self.layers
