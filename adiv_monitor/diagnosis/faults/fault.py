"""The registry of faults: how each is called, what follows from it, and the rules that find it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal, TypeVar

from adiv_monitor.diagnosis.finding import Finding, Strength
from adiv_monitor.diagnosis.readings import by_layer
from adiv_monitor.diagnosis.record import Record

_R = TypeVar("_R", bound=Callable[..., Iterable[Finding]])
FEWEST_LAYERS = 3  # fewer layers have no path on which a gradient could vanish
FEWEST_REPORTS = 3  # fewest reports that show typical values
Condition = Callable[[Record], object]
# The runs of which a rule is asked: all, audits, monitors' runs; or all, given all other findings.
Of = Literal["", "audit", "monitor", "rest"]

# What may follow from a fault in wiring or loss that exists before the first step.
LEARNING = ("rate-too-high", "rate-too-low", "dead-units", "saturated-units", "cannot-overfit",
            "behind-reference", "loss-stuck", "zero-gradient")  # fmt: skip
# What may follow from steps that are far too long.
LONG_STEPS = (
    *("rate-too-low", "loss-stuck", "stands-still", "outside-healthy", "non-finite", "dead-units"),
    *("saturated-units", "exploding", "vanishing", "uneven-rates", "optimizer-turns"),
    "bad-initialisation",
)


@dataclass(frozen=True)
class Fault:
    """A kind of finding.

    Attributes:
        title: what pages call it.
        family: the family that it belongs to, by the name of its file.
        shown_by: whether the record of a monitor's run holds what could show the fault; by
            default no such record does.
        about: "loop": it keeps the user's own loop from training; "inputs"; "symptom": if only
            reports are known, it gives no advice beside other findings; "course": it explains the
            pictures, and is no fault; "last": it defers to every other finding to act on; "":
            anything else.
        certain: whether it holds whatever the result of a short run.
        explains: findings that may follow from it.
        acts_below: a fact that may be harmless: it is to be acted on if the run suffers, or if a
            fix helps and leaves less than this share of the loss; None: it is no such fact.
        often_meant: whether such a fact is a note if a fix of it was tried and does not help.
    """

    title: str
    family: str
    shown_by: Condition = lambda record: False
    about: Literal["", "loop", "inputs", "symptom", "course", "last"] = ""
    certain: bool = False
    explains: tuple[str, ...] = ()
    acts_below: float | None = None
    often_meant: bool = False


FAULTS: dict[str, Fault] = {}
RULES: dict[FunctionType, Of] = {}


def several(record: Record) -> bool:
    """Return whether there are enough reports to show what is typical."""
    return len(record.reports) >= FEWEST_REPORTS


def stepped(record: Record) -> bool:
    """Return whether several reports show an optimizer's steps."""
    return several(record) and bool(by_layer(record, "parameter_cosine"))


def reported(field: str) -> Condition:
    """Return the condition that there are several reports, and that one of them holds a field."""
    return lambda record: several(record) and any(getattr(r, field) for r in record.reports)


def act_if(harms: object) -> Strength:
    """Return "act" if the condition holds, else "watch"."""
    return "act" if harms else "watch"


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
        FAULTS[name] = Fault(title, rule.__module__.rpartition(".")[2], **attributes)
        return finds(of)(rule)

    return register


def loop_fault(name: str, title: str, **attributes: Any) -> Callable[[_R], _R]:
    """Register a fault of the user's own loop, which only a monitor's run can show."""
    return fault(name, title, "monitor", about="loop", **attributes)


def finds(of: Of = "") -> Callable[[_R], _R]:
    """Register one more rule; its faults are registered elsewhere."""

    def register(rule: _R) -> _R:
        assert isinstance(rule, FunctionType)
        RULES[rule] = of
        return rule

    return register
