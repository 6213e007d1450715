"""Rules over measures, `[LAYERS:] MEASURE > NUMBER`: parsed, never evaluated."""

import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from adiv_monitor.report import (
    ALIGNMENT_MEASURES,
    ATTENTION_MEASURES,
    MEASURES,
    Alarm,
    LayerReading,
    StepReport,
)

_COMPARISONS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_RULE = re.compile(
    r"""(?: (?P<layers> .+ ) : )? \s*
        (?P<measure> \w+ ) \s* (?P<comparison> >=? | <=? ) \s*
        (?P<limit> [-+]? (?: \d+ \.? \d* | \. \d+ ) (?: [eE] [-+]? \d+ )? )""",
    re.VERBOSE,
)
# How far beyond the limit a value must lie, as wherever values are told apart.
_ERRORS = 2

# Layer and reading → whether to raise an alarm.
Condition = Callable[[str, LayerReading], bool]


@dataclass(frozen=True)
class Rule:
    """A comparison of a measure with a number, in some layers.

    Attributes:
        text: as it was written.
        layers: glob pattern over layers.
        measure: that is compared; of an audit's rule without a comparison, what it asks for.
        comparison: ">", ">=", "<", "<="; "": none.
        limit: with what the measure is compared.
    """

    text: str
    layers: str
    measure: str
    comparison: str = ""
    limit: float = math.nan

    def holds(self, value: float, error: float) -> bool:
        """Whether the value lies beyond the limit by more than two of its standard errors.

        One without direction (NaN), or whose error is not known, does not.
        """
        compare = _COMPARISONS[self.comparison]
        towards_limit = -_ERRORS * error if self.comparison.startswith(">") else _ERRORS * error
        return not math.isnan(value + error) and compare(value + towards_limit, self.limit)


def parse(text: str, *measures: str) -> Rule | None:
    """The rule that the text states; None if it does not have the form of one.

    Args:
        text: `[LAYERS:] MEASURE > NUMBER` (or >=, <, <=), LAYERS a glob pattern over layers.
        measures: those that there are.

    Raises:
        ValueError: there is no such measure.
    """
    match = _RULE.fullmatch(text.strip())
    if match is None:
        return None
    measure = match["measure"]
    if measure not in measures:
        close = get_close_matches(measure, measures, 2) or measures
        raise ValueError(
            f"{text!r}: there is no measure {measure!r}; expected one such as {', '.join(close)}"
        )
    layers = (match["layers"] or "*").strip()
    return Rule(text, layers, measure, match["comparison"], float(match["limit"]))


class Alarms:
    """Says where rules hold in a report.

    Args:
        rules: texts, or functions of a layer's path and reading.

    Raises:
        TypeError, ValueError: one of them is no rule; the message says what is expected.
    """

    def __init__(self, rules: Sequence[str | Condition]) -> None:
        if isinstance(rules, str) or not isinstance(rules, Sequence):
            raise TypeError(f"Monitor(alarms=…): got {rules!r}, expected a list of rules")
        self._rules = [rule if callable(rule) else _parsed(rule) for rule in rules]
        self._idle = [rule for rule in self._rules if isinstance(rule, Rule)]

    @property
    def idle(self) -> tuple[str, ...]:
        """Rules that have found nothing to compare in any report so far."""
        return tuple(rule.text for rule in self._idle)

    def of(
        self, report: StepReport, fail: Callable[[str, Exception], None] | None = None
    ) -> tuple[Alarm, ...]:
        """Those that the report raises, rule by rule and layer by layer.

        Args:
            report: the report.
            fail: called with the name of a rule and the exception that it met; None: it is raised.
        """
        found: list[Alarm] = []
        self._idle = [rule for rule in self._idle if not any(_compared(rule, report))]
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
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"  # all have one name


def _parsed(text: object) -> Rule:
    if not isinstance(text, str):
        raise TypeError(
            f"Monitor(alarms=…): got {text!r}, expected a rule such as 'projection_cosine < 0', or "
            "a function of a layer's path and reading"
        )
    try:
        rule = parse(text, *MEASURES, *ATTENTION_MEASURES, *ALIGNMENT_MEASURES)
    except ValueError as error:
        raise ValueError(f"Monitor(alarms=…): {error}") from None
    if rule is None:
        raise ValueError(
            f"Monitor(alarms=…): got {text!r}, expected [LAYERS:] MEASURE > NUMBER with one of "
            "> >= < <=, such as 'encoder.*: update_ratio > 0.5'"
        )
    return rule


def _raised(rule: Rule | Condition, report: StepReport) -> Iterator[Alarm]:
    if not isinstance(rule, Rule):
        name = _name(rule)
        yield from (Alarm(name, path) for path, r in report.layers.items() if rule(path, r))
        return
    for path, value, error in _compared(rule, report):
        if rule.holds(value, error):
            yield Alarm(rule.text, path, value, error)


def _compared(rule: Rule, report: StepReport) -> Iterator[tuple[str, float, float]]:
    """What the rule looks at: layer, value and standard error."""
    for path, reading in report.readings(rule.measure).items():
        value = getattr(reading, rule.measure)
        if value is not None and fnmatchcase(path, rule.layers):
            yield path, value, reading.standard_error.get(rule.measure, 0.0)
