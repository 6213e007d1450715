"""The audit's page: one self-contained HTML file, of one report or of two side by side."""

from adiv_monitor.audit.page.compare_page import compare
from adiv_monitor.audit.page.digest import digest
from adiv_monitor.audit.page.report_page import page
from adiv_monitor.audit.page.running_files import beside, is_ours, running_files
from adiv_monitor.audit.page.running_page import running_page

__all__ = ["beside", "compare", "digest", "is_ours", "page", "running_files", "running_page"]
