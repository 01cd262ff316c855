"""`build_report(run_dir)`: report.html (one self-contained file) and summary.md from the records in a run folder.

    path = build_report(Path("reports/kimi_requant/2026-10-01_12-00-00"))

Everything shown is read from the run folder's files; a stage that did not run says so. The page needs no network and no
script (its Content-Security-Policy forbids both), answers of models are escaped, and it stays below 1 MB: where a run
has very many flipped answers or matrices, fewer are printed: flips are counted, heat map cells joined.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import jinja2

from workbench.errors import ConfigError
from workbench.records import write_text

from .context import make_context
from .load import RunFiles, load_run
from .text import FILTERS, interval

LIMIT_BYTES = 1_000_000
_DETAIL = ((30, 4000), (10, 2500), (3, 1200), (0, 400))  # flips per task and direction, heat map cells: first to fit

_PARTS = {  # file: RunFiles' attribute
    "analysis.json": "analysis", "gemm.parquet": "gemm", "tensors.parquet": "tensors", "verdict.json": "verdict",
    "comparison.json": "comparison", "lint": "lint", "server": "servers", "eval": "evaluations",
    "manifest.json": "manifest", "serving_cost.json": "serving_cost",
}  # fmt: skip
_BY_ARM = ("lint", "servers", "evaluations")
_MISFIT = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, jinja2.TemplateError)


def build_report(run_dir: Path, *, strict: bool = False) -> Path:
    """Write report.html and summary.md into `run_dir` and return the former's path.

    Raises ConfigError when `run_dir` is no run folder (nothing is written then), OutputError. Files that cannot be
    read, or whose contents do not fit together, are left out and named on both pages; strict: OutputError names them
    as well, once the pages are written.
    """
    if not str(run_dir):
        raise ConfigError("'' is no run folder", fix="give the folder that a run printed")
    run_dir = Path(run_dir)
    html, summary, files = _render_readable(load_run(run_dir))
    target = run_dir / "report.html"
    write_text(run_dir / "summary.md", summary)
    write_text(target, html)
    if strict:
        files.refuse_damaged()
    return target


def _render_readable(files: RunFiles) -> tuple[str, str, RunFiles]:
    """Both pages, and the files shown. A file that reads well but holds something else is found by leaving files
    out."""
    try:
        return *_render_pages(files), files
    except _MISFIT as error:
        present = [name for name, attribute in _PARTS.items() if _is_there(getattr(files, attribute))]
        for left_out in [*([name] for name in present), *(present[:n] for n in range(2, len(present) + 1))]:
            problems = [f"{name}: its contents do not fit ({type(error).__name__}: {error})" for name in left_out]
            changes: dict[str, Any] = {_PARTS[name]: {} if _PARTS[name] in _BY_ARM else None for name in left_out}
            with contextlib.suppress(*_MISFIT):
                fewer = dataclasses.replace(files, problems=[*files.problems, *problems], **changes)
                return *_render_pages(fewer), fewer
        raise


def _is_there(part: Any) -> bool:
    return part is not None and not (isinstance(part, dict) and not part)


def _render_pages(files: RunFiles) -> tuple[str, str]:
    """report.html, in as much detail as fits, and summary.md."""
    for flips, cells in _DETAIL:
        context = make_context(files, flips=flips, cells=cells)
        html = _render("report.html", context)
        if len(html.encode()) < LIMIT_BYTES:
            break
    return html, _render("summary.md", context)


def _render(name: str, context: dict[str, Any]) -> str:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("workbench.reporting"),
        autoescape=name.endswith(".html"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    environment.globals["interval"] = interval
    return environment.get_template(name).render(context)
