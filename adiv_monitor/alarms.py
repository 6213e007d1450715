"""Alarm rules over readings, `[LAYERS:] MEASURE > NUMBER`, parsed without `eval`."""

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from adiv_monitor.report import (
    ALIGNMENT_MEASURES,
    ATTENTION_MEASURES,
    MEASURES,
    NO_MAPS,
    Alarm,
    LayerReading,
    StepReport,
)

_MEASURES = (*MEASURES, *ATTENTION_MEASURES, *ALIGNMENT_MEASURES)
_COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_RULE = re.compile(
    r"""(?: (?P<layers> .+ ) : )? \s*
        (?P<name> [\w-]+ ) \s* (?: (?P<comparison> >=? | <=? ) \s*
        (?P<limit> [-+]? (?: \d+ \.? \d* | \. \d+ ) (?: [eE] [-+]? \d+ )? ) )?""",
    re.VERBOSE,
)
NON_FINITE = "non_finite"
# Number of standard errors by which a value must lie beyond the limit, as in all comparisons.
_ERRORS = 2

# Function of a layer's path and its reading that returns whether to raise an alarm.
Condition = Callable[[str, LayerReading], bool]
Rules = Sequence[str | Condition] | Literal["default"]


@dataclass(frozen=True)
class Rule:
    """A comparison of a measure with a number, in the layers that match a pattern.

    Attributes:
        text: the rule as the user wrote it.
        layers: glob pattern over layer paths.
        measure: measure that is compared; "non_finite" for a rule without a comparison.
        comparison: ">", ">=", "<" or "<="; "" if the rule has no comparison.
        limit: number that the measure is compared with.
        of_preset: whether the rule is one of `alarms="default"`, which are compared only where the
            healthy range is known.
    """

    text: str
    layers: str
    measure: str
    comparison: str = ""
    limit: float = math.nan
    of_preset: bool = False

    def holds(self, value: float, error: float) -> bool:
        """Return whether the value lies beyond the limit by more than two of its standard errors.

        A value without direction (NaN), or with an unknown error, never lies beyond the limit.
        """
        compare = _COMPARISONS[self.comparison]
        towards_limit = -_ERRORS * error if self.comparison.startswith(">") else _ERRORS * error
        return not math.isnan(value + error) and compare(value + towards_limit, self.limit)


def parse(text: str, names: Sequence[str] = (NON_FINITE,)) -> Rule:
    """Parse the text of a rule.

    Args:
        text: `[LAYERS:] MEASURE > NUMBER` (or >=, <, <=), or `[LAYERS:] NAME`; LAYERS is a glob
            pattern over paths.
        names: what a rule without a comparison may name.

    Raises:
        ValueError: the text is no rule, or names an unknown measure.
    """
    match = _RULE.fullmatch(text.strip())
    name, comparison = (match["name"], match["comparison"]) if match else (text, None)
    if match is None or (comparison is None and name not in names):
        close = " or ".join(map(repr, get_close_matches(name, names, 2) or names[:2]))
        raise ValueError(
            f"{text!r}: expected [LAYERS:] MEASURE > NUMBER with one of > >= < <=, such as "
            f"'encoder.*: update_ratio > 0.5', or [LAYERS:] NAME, such as {close}"
        )
    layers = (match["layers"] or "*").strip()
    if comparison is None:
        return Rule(text, layers, name)
    if name not in _MEASURES:
        close = ", ".join(get_close_matches(name, _MEASURES, 2) or _MEASURES)
        raise ValueError(f"{text!r}: there is no measure {name!r}; expected one such as {close}")
    return Rule(text, layers, name, comparison, float(match["limit"]))


# Placeholder for the rules of `_preset`, alone or in a list of rules.
PRESET = "default"


def _preset() -> Iterator[Rule]:
    """Yield the rules that no healthy layer violates.

    They find values that are not finite, steps with a negative projection cosine, and steps far
    too large by `HEALTH`. They ignore effects of the data or the architecture alone (rows without
    a gradient, their scales) and of a decaying learning rate.
    """
    from adiv_monitor.diagnosis.health import HEALTH  # loads the rules of findings

    limit, _ = HEALTH["update_ratio"].knots[-1]
    for text in (NON_FINITE, "projection_cosine < 0", f"update_ratio > {limit:g}"):
        yield replace(parse(text), of_preset=True)


class Alarms:
    """Finds the layers of a report in which the rules hold.

    Args:
        rules: texts, or functions of a layer's path and reading; "default" adds the rules of the
            preset.

    Raises:
        TypeError, ValueError: an entry is not a rule; the message says what is expected.
    """

    def __init__(self, rules: Rules) -> None:
        rules = [rules] if rules == PRESET else rules
        if isinstance(rules, str) or not isinstance(rules, Sequence):
            raise TypeError(
                f"Monitor(alarms=…): got {rules!r}, expected a list of rules, or {PRESET!r}"
            )
        self._rules: list[Rule | Condition] = []
        for rule in rules:
            self._rules += [rule] if callable(rule) else _parsed(rule)
        self._idle = [rule for rule in self.rules if not rule.of_preset]

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules that were given as texts."""
        return tuple(rule for rule in self._rules if isinstance(rule, Rule))

    @property
    def idle(self) -> tuple[str, ...]:
        """Rules that have found nothing to compare in any report so far."""
        return tuple(rule.text for rule in self._idle)

    def of(
        self, report: StepReport, fail: Callable[[str, Exception], None] | None = None
    ) -> tuple[Alarm, ...]:
        """Return the alarms that the report raises, rule by rule and layer by layer.

        Args:
            report: the report to check.
            fail: called with the name of a rule and the exception that it raised; None: the
                exception propagates.
        """
        found: list[Alarm] = []
        self._idle = [rule for rule in self._idle if not any(compared(rule, report))]
        for rule in self._rules:
            try:
                found += _raised(rule, report)
            except Exception as error:
                if fail is None:
                    raise
                fail(_name(rule), error)
        return tuple(found)


def _name(rule: Rule | Condition) -> str:
    if isinstance(rule, Rule):
        return rule.text
    name = str(getattr(rule, "__qualname__", type(rule).__qualname__))
    code = getattr(rule, "__code__", None)
    if code is None or "<lambda>" not in name:
        return name
    # All lambdas have the same name, so the file and the line are added.
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"


def _parsed(text: object) -> list[Rule]:
    if not isinstance(text, str):
        raise TypeError(
            f"Monitor(alarms=…): got {text!r}, expected a rule such as 'projection_cosine < 0', or "
            "a function of a layer's path and reading"
        )
    if text == PRESET:
        return list(_preset())
    try:
        return [parse(text)]
    except ValueError as error:
        raise ValueError(
            f"Monitor(alarms=…): {error}; or {PRESET!r}, or a function of a layer's path and "
            "reading"
        ) from None


def _raised(rule: Rule | Condition, report: StepReport) -> Iterator[Alarm]:
    if not isinstance(rule, Rule):
        name = _name(rule)
        yield from (Alarm(name, path) for path, r in report.layers.items() if rule(path, r))
        return
    if rule.measure == NON_FINITE:
        yield from _not_finite(rule, report)
        return
    for path, value, error in compared(rule, report):
        if rule.holds(value, error):
            yield Alarm(rule.text, path, value, error)


def compared(rule: Rule, report: StepReport) -> Iterator[tuple[str, float, float]]:
    """Yield layer, value and standard error of everything that the rule compares."""
    for path, reading in report.readings(rule.measure).items():
        if not fnmatchcase(path, rule.layers):
            continue
        if rule.measure == NON_FINITE:
            yield path, math.nan, 0.0
            continue
        value = getattr(reading, rule.measure)
        # No healthy range is known for gains, offsets and look-ups. A ratio to activations that
        # are zero, as with weights that are initialised to zero, is infinite.
        skips = rule.of_preset and _is_of_maps(rule.measure)
        if value is None or (
            skips and (getattr(reading, "kind", "") in NO_MAPS or math.isinf(value))
        ):
            continue
        yield path, value, reading.standard_error.get(rule.measure, 0.0)


def _is_of_maps(measure: str) -> bool:
    from adiv_monitor.diagnosis.health import HEALTH

    return HEALTH[measure].of_maps


def _not_finite(rule: Rule, report: StepReport) -> Iterator[Alarm]:
    """Yield one alarm, for the first value that was not finite: the others may follow from it."""
    of_all = rule.text.strip() == NON_FINITE  # the loss belongs to no layer
    broken = [
        (what, layer)
        for what, layer in report.non_finite()
        if (of_all if what == "loss" else fnmatchcase(layer, rule.layers))
    ]
    losses = report.losses.items() if of_all else ()
    lost = [step for step, loss in losses if not math.isfinite(loss)]
    if lost and (lost[0] < report.step or broken[0][0] == "loss"):
        said = f"the loss of step {lost[0]} is {report.losses[lost[0]]}"
        yield Alarm(rule.text, "", non_finite=said)
    elif broken:
        what, layer = broken[0]
        verb = "are" if what.endswith("s") else "is"
        of = layer or "the model itself"
        said = f"the {what} of {of} {verb} NaN, infinite or too large to square"
        others = len({layer for what, layer in broken if what != "loss"}) - 1
        more = f"; so is something of {others} more layer{'s' * (others > 1)}" if others else ""
        yield Alarm(rule.text, layer, non_finite=said + more)
