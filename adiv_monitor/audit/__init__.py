"""A diagnosis of a training run: its faults, how sure they are, and the fixes that were tried."""

from typing import TYPE_CHECKING, Any

from adiv_monitor.audit.audit import audit

if TYPE_CHECKING:
    from adiv_monitor.audit.report import AuditReport

__all__ = ["AuditReport", "audit"]


def __getattr__(name: str) -> Any:
    if name == "AuditReport":  # loads the pages
        from adiv_monitor.audit.report import AuditReport

        return AuditReport
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
