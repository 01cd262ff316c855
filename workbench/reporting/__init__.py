"""Reports: a run folder's records rendered as one self-contained HTML file and as Markdown."""

from .build import build_report

__all__ = ["build_report"]
