"""The diagnosis of a run: record and findings, as plain data and JSON."""

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from adiv_monitor.diagnosis.course import difference
from adiv_monitor.diagnosis.diagnose import TRAITS, fault_of, follows, running_headline
from adiv_monitor.diagnosis.finding import HIGHER_RATES, Advice, Finding, Strength
from adiv_monitor.diagnosis.record import Record
from adiv_monitor.report.plain import to_json
from adiv_monitor.report.written import plain, read

_D = TypeVar("_D", bound="Diagnosis")
SCHEMA = 4  # of `Diagnosis.to_dict`; see docs/report-schema.md
# Families of states that other faults lead to; of the others, a finding to watch may be the cause.
# Traits, which healthy runs have, too, may be only if the loss does not fall.
OF_STEPS = ("rates", "units", "states")
SETTINGS = ("group-rates",)  # but for these, which the user has chosen
_READ = (2, 3, SCHEMA)  # what the former held besides, such as `what_if`, is ignored


@dataclass(frozen=True)
class Diagnosis:
    """The record of one run, and the findings in it.

    Attributes:
        findings: findings, strongest first; causes before their consequences.
        record: observations of the run.
    """

    findings: tuple[Finding, ...]
    record: Record

    @property
    def worst(self) -> Strength | None:
        """The strength of the strongest finding; None: there is none."""
        return self.findings[0].strength if self.findings else None

    @property
    def verdict(self) -> str:
        """The result in one or two sentences."""
        if not self.record.is_audited:
            return f"{running_headline(self.findings, self.record)}."
        act = [f for f in self.findings if f.strength == "act"]
        said = _cause(act, self.findings) if act else self._nothing()
        if differs := difference(self.record):
            said = (
                f"The copy does not train as your run did: {differs}. The copy lacks the cause of "
                f"this difference, which may be the fault of your run. About the copy: {said}"
            )
        lost = f" The copy differs from your run: {'; '.join(self.record.lost)}."
        return said + lost * bool(self.record.lost)

    def _nothing(self) -> str:
        """Return the verdict without findings to act on, unless the loss contradicts it."""
        rest = f" {_count(len(self.findings), 'weaker finding')} below." * bool(self.findings)
        rest = " Other learning rates were not tried." * (not self.record.rates) + rest
        watched = [f for f in self.findings if f.strength == "watch"]
        symptoms = "loss-stuck", "behind-reference"
        stuck = next((f.summary for f in self.findings if f.name in symptoms), "")
        may_be = [f for f in watched if fault_of(f).family not in OF_STEPS or f.name in SETTINGS]
        likely = next((f.summary for f in may_be if stuck or f.name not in TRAITS), "")
        if stuck:
            said = f"The likely cause: {likely}" if likely else "The audit did not find the cause."
            return f"{stuck} {said}{rest}"
        better = _best(watched)
        if likely and (better is None or better.fix in HIGHER_RATES):
            return (
                "The audit found nothing to act on for certain. If its results are not what they "
                f"should be, this is the likely cause: {likely}{rest}"
            )
        if better is not None:
            short = "; so short a run favours high learning rates" * (better.fix in HIGHER_RATES)
            return (
                "The audit found nothing to act on, but a fix that it tried lowers the loss: "
                f"{better}{short}.{rest}"
            )
        return f"The audit found nothing that hinders this training.{rest}"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as nested plain data; docs/report-schema.md describes the fields."""
        bare = plain(replace(self, record=replace(self.record, reports=())))
        bare["record"]["reports"] = [r.to_dict() for r in self.record.reports]
        return {"schema": SCHEMA, "verdict": self.verdict, "worst": self.worst, **bare}

    @classmethod
    def from_dict(cls: type[_D], record: Mapping[str, Any]) -> _D:
        """Read a report back from a record of `to_dict`, exactly.

        Schemas 2 and 3, which earlier versions wrote, are read without what is no field any more.

        Raises:
            ValueError: the schema is another, or a value does not fit; the message says where, what
                it is and what is expected.
        """
        got = record.get("schema") if isinstance(record, Mapping) else type(record).__name__
        if got not in _READ:
            raise ValueError(
                f"{cls.__name__}.from_dict: got schema {reprlib.repr(got)}, expected "
                f"{' or '.join(map(str, _READ))}: the report.json of an audit"
            )
        return read(cls, record)

    def to_json(self) -> str:
        """Return the report as strict JSON, with "NaN", "Infinity" and "-Infinity" as texts."""
        return to_json(self.to_dict())

    @classmethod
    def from_json(cls: type[_D], text: str) -> _D:
        """Read a report back from a text of `to_json`, exactly.

        Raises:
            ValueError: the text is not JSON, or not a report that `from_dict` reads.
        """
        return cls.from_dict(json.loads(text))


def _cause(act: Sequence[Finding], findings: Sequence[Finding]) -> str:
    """Return what hinders the training, what to do, what follows from it, and how much else."""
    first = act[0]
    names = [f.name for f in findings if follows(f) and f.name in fault_of(first).explains]
    explained = f" This would explain: {', '.join(dict.fromkeys(names))}." if names else ""
    others = f" And {_count(len(act) - 1, 'more finding')} to act on." * (len(act) > 1)
    return first.summary + _fixed(act) + explained + others


def _fixed(act: Sequence[Finding]) -> str:
    """Return the fix of the first finding, or if none that was tried helps, of another finding."""
    if not (advice := act[0].advice):
        return ""
    first, tried = advice[0], any(each.trial for each in advice)
    if first.trial is not None and first.trial.helps:
        return f" To fix it: {first}."
    # A certain fault is one whatever the result of a short run.
    if fault_of(act[0]).certain or not tried:
        return f" What to do: {first.text if tried else first}."
    best, to_try = _best(act[1:]), f"; to try next: {first}" * (first.trial is None)
    other = to_try if best is None else f"; a fix of another finding did: {best}"
    return f" None of its fixes helped in a trial{other}."


def _best(findings: Sequence[Finding]) -> Advice | None:
    """Return the advice whose trial ended at the lowest loss among those that help."""
    helping = [a for each in findings for a in each.advice if a.trial and a.trial.helps]
    return min(helping, key=lambda a: a.trial.loss if a.trial else math.inf, default=None)


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"
