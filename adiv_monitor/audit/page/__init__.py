"""The audit's page: one self-contained HTML file, of one report or of two side by side."""

from adiv_monitor.audit.page.compare_page import compare
from adiv_monitor.audit.page.report_page import page

__all__ = ["compare", "page"]
