"""The audit's report: plain data, as JSON and back."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from adiv_monitor.audit.finding import Finding
from adiv_monitor.audit.record import Record
from adiv_monitor.audit.what_if import Alternative


@dataclass(frozen=True)
class AuditReport:
    """What an audit found.

    Attributes:
        findings: strongest first; causes before what follows from them.
        record: what was seen of the run.
        what_if: layer → alternative ("as it is", "affine-like", …) → how its step would be.
    """

    findings: tuple[Finding, ...]
    record: Record
    what_if: Mapping[str, Mapping[str, Alternative]] = field(default_factory=dict)
