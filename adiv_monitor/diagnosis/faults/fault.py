"""The registry of faults: how each is called, what follows from it, and the rules that find it."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar

from adiv_monitor.diagnosis.finding import RATES, Advice, Evidence, Finding, Strength, act_if
from adiv_monitor.diagnosis.record import Fact, Probed, Record
from adiv_monitor.report.wording import listed

_R = TypeVar("_R", bound=Callable[..., Iterable[Finding]])
_SHOWN = 5  # layers whose values are evidence
Condition = Callable[[Record], object]
Rule = Callable[[Record], Iterable[Finding]]
# The runs of which a rule is asked: all, audits, monitors' runs; or all, given all other findings.
Of = Literal["", "audit", "monitor", "rest"]

# What may follow from a fault in wiring or loss that exists before the first step.
NOT_LEARNT = ("rate-too-high", "rate-too-low", "dead-units", "saturated-units", "cannot-overfit",
              "behind-reference", "loss-stuck", "zero-gradient")  # fmt: skip
# The same for a fault that has a place: it comes before what only says that something is wrong.
LEARNING = (*NOT_LEARNT, "outputs-in-vain")
# What may follow from steps that are far too long.
LONG_STEPS = ("rate-too-low", "loss-stuck", "stands-still", "non-finite", "dead-units",
              "saturated-units", "exploding", "vanishing", "uneven-rates", "optimizer-turns",
              "bad-initialisation")  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A kind of finding.

    Attributes:
        title: what pages call it.
        family: the family that it belongs to, by the name of its file.
        shown_by: whether the record of a monitor's run holds what could show the fault; by
            default no such record does.
        about: "loop": it keeps the user's own loop from training; "inputs"; "symptom": if only
            reports are known, it gives no advice beside other findings; "last": it defers to every
            other finding to act on; "": anything else.
        certain: whether it holds whatever the result of a short run.
        explains: findings that may follow from it.
        acts_below: a fact that may be harmless: it is to be acted on if the run suffers, or if a
            fix helps and leaves less than this share of the loss; None: it is no such fact.
        often_meant: whether such a fact is a note if the loss falls, and a fix of it was tried.
    """

    title: str
    family: str
    shown_by: Condition = lambda record: False
    about: Literal["", "loop", "inputs", "symptom", "last"] = ""
    certain: bool = False
    explains: tuple[str, ...] = ()
    acts_below: float | None = None
    often_meant: bool = False


FAULTS: dict[str, Fault] = {}
RULES: dict[Callable[..., Iterable[Finding]], Of] = {}  # within a family in the order of its file


def fault(name: str, title: str, of: Of = "", **attributes: Any) -> Callable[[_R], _R]:
    """Register a fault, and the rule that finds it. A rule may find several.

    Args:
        name: the stable name of its findings.
        title: the title of the `Fault`.
        of: the runs of which the rule is asked.
        attributes: others of the `Fault`.

    Raises:
        ValueError: the name is taken.
    """

    def register(rule: _R) -> _R:
        if name in FAULTS:
            raise ValueError(f"fault: got {name!r} twice, expected a name for each: use `finds`")
        FAULTS[name] = Fault(title, family_of(rule), **attributes)
        return finds(of)(rule)

    return register


def loop_fault(name: str, title: str, **attributes: Any) -> Callable[[_R], _R]:
    """Register a fault of the user's own loop, which only a monitor's run can show."""
    return fault(name, title, "monitor", about="loop", **attributes)


def finds(of: Of = "") -> Callable[[_R], _R]:
    """Register one more rule; its faults are registered elsewhere."""

    def register(rule: _R) -> _R:
        RULES[rule] = of
        return rule

    return register


def family_of(rule: Callable[..., object]) -> str:
    """Return the family of a rule, the name of its file."""
    return rule.__module__.rpartition(".")[2]


class Number(NamedTuple):
    """A number of a fact, which is evidence of a fault.

    Attributes:
        measure: what it measures.
        name: its name in the fact; "": the number of facts.
        above: only a larger number shows the fault; None: it has no such limit.
        below: only a smaller number shows the fault; None: it has no such limit.
    """

    measure: str
    name: str = ""
    above: float | None = None
    below: float | None = None

    @property
    def limit(self) -> float | None:
        """The limit, if there is one."""
        return self.below if self.above is None else self.above

    def shows(self, fact: Fact) -> bool:
        """Return whether the number of a fact is beyond the limit."""
        value = fact.numbers.get(self.name, math.nan) if self.name else 1.0
        is_above = self.above is None or value > self.above
        return is_above and (self.below is None or value < self.below)


def told(file: str, name: str, title: str, strength: Strength | Condition, said: str,
         *shown: Number | Advice, not_advised: str = "",
         against: tuple[str, ...] = RATES, where: Callable[[Fact], object] = lambda fact: True,
         unless: Condition = lambda record: False, of_modules: bool = False,
         **attributes: Any) -> Rule:  # fmt: skip
    """Register a fault that facts tell, those that the question of its name found; return the rule.

    Its one finding is about the worst of the facts, by the first number, and names all places.

    Args:
        file: the module of its family: `__name__`.
        name: the stable name of its findings, and of the question.
        title: the title of the `Fault`; "": it is registered already, by other facts of it.
        strength: of its finding; or the condition on which that is "act" instead of "watch".
        said: the sentence, with `{place}` or `{all_places}`, and the fact's numbers and words by
            their names.
        shown: the numbers that are evidence, by default that of the places, which must all be
            beyond their limits; and what to do.
        not_advised: what would not help.
        against: the fixes that `not_advised` is about.
        where: the facts that count.
        unless: the condition on which nothing is found.
        of_modules: whether the places are paths of modules, which are the finding's layers.
        attributes: others of the `Fault`.
    """
    numbers = [x for x in shown if isinstance(x, Number)] or [Number("places")]
    advice = tuple(x for x in shown if isinstance(x, Advice))

    def rule(record: Record) -> Iterator[Finding]:
        facts = [f for f in record.found_by(name) if where(f) and all(n.shows(f) for n in numbers)]
        if not facts or unless(record):
            return
        main, found = numbers[0], float(len(facts))
        facts.sort(key=lambda f: f.numbers.get(main.name, 0.0), reverse=main.below is None)
        worst, *rest = facts
        seen = replace(record, probed={**record.probed, name: Probed(tuple(facts))})
        module = worst.place if of_modules else None
        others = [f for f in rest if f.place and "{all_places}" not in said]
        yield Finding(name,
            strength if isinstance(strength, str) else act_if(strength(seen)),
            said.format(place=worst.place, all_places=places(facts), **worst.numbers, **worst.words)
            + f" It is alike at {places(others)}." * bool(others),
            tuple(Evidence(n.measure, worst.numbers.get(n.name, found), n.limit, module)
                  for n in numbers),
            advice, not_advised, layers=tuple(f.place for f in facts) * of_modules,
            since=0, against=against)  # fmt: skip

    rule.__module__ = file
    register = fault(name, title, **attributes) if title else finds()
    return register(rule)


def places(facts: Iterable[Fact]) -> str:
    """Return the places of facts in quotes: three of them, and the number of further ones."""
    return listed([f"'{fact.place}'" for fact in facts])


def of_layers(measure: str, values: Mapping[str, float], limit: float) -> tuple[Evidence, ...]:
    """Return the values of the first layers, which are the worst ones, as evidence."""
    return tuple(Evidence(measure, values[p], limit, p) for p in [*values][:_SHOWN])
