"""Pages and texts of one diagnosis, or of two side by side: self-contained HTML, and Markdown."""

from adiv_monitor.pages.compare_page import compare
from adiv_monitor.pages.digest import digest
from adiv_monitor.pages.report_page import page
from adiv_monitor.pages.running_files import beside, is_ours, running_files

__all__ = ["beside", "compare", "digest", "is_ours", "page", "running_files"]
