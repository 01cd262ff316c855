"""`build_report(run_dir)`: report.html (one self-contained file) and summary.md from the records in a run folder.

    path = build_report(Path("reports/kimi_requant/2026-10-01_12-00-00"))

Everything shown is read from the run folder's files; a stage that did not run says so. The page needs no network and no
script (its Content-Security-Policy forbids both), answers of models are escaped, and it stays below 1 MB: where a run
has very many flipped answers or matrices, fewer are printed: flips are counted, heat map cells joined.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from workbench.records import write_text

from .context import make_context
from .load import load_run
from .text import FILTERS, interval

LIMIT_BYTES = 1_000_000
_DETAIL = ((30, 4000), (10, 2500), (3, 1200), (0, 400))  # flips per task and direction, heat map cells: first to fit


def build_report(run_dir: Path) -> Path:
    """Write report.html and summary.md into `run_dir` and return the former's path. Raises OutputError."""
    run_dir = Path(run_dir)
    files = load_run(run_dir)
    for flips, cells in _DETAIL:
        context = make_context(files, flips=flips, cells=cells)
        html = _render("report.html", context)
        if len(html.encode()) < LIMIT_BYTES:
            break
    target = run_dir / "report.html"
    write_text(run_dir / "summary.md", _render("summary.md", context))
    write_text(target, html)
    return target


def _render(name: str, context: dict[str, Any]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("workbench.reporting"),
        autoescape=name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    environment.globals["interval"] = interval
    return environment.get_template(name).render(context)
