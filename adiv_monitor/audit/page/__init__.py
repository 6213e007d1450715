"""The audit's page: one self-contained HTML file, of one report or of two side by side."""

from adiv_monitor.audit.page.compare_page import compare
from adiv_monitor.audit.page.report_page import page
from adiv_monitor.audit.page.running_page import running_page

__all__ = ["compare", "page", "running_page"]
