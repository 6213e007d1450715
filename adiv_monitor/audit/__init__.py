"""A diagnosis of a training run: what is wrong, how sure that is, and a fix that was tried."""

from adiv_monitor.audit.audit import audit
from adiv_monitor.audit.report import AuditReport

__all__ = ["AuditReport", "audit"]
