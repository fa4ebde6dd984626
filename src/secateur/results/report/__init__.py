"""The report: one page in one file, or served while a run is running."""

from secateur.results.report.live import serve
from secateur.results.report.page import write_report

__all__ = ["serve", "write_report"]
