"""`build_report(run_dir)`: report.html, summary.md, report.json and flips.jsonl from the records in a run folder.

    path = build_report(Path("reports/kimi_requant/2026-10-01_12-00-00"))

Everything shown is read from the run folder's files; a stage that did not run says so. report.html is one file that
needs no network: its Content-Security-Policy allows one script, by its hash, and what matters shows without it. Texts
of models, prompts and checkpoints are escaped. The page stays below 1 MB (2 MB where a run has more than 20,000
matrices): where it would not, fewer flips and figures are printed; the files beside it hold all of them.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
from collections.abc import Callable
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from workbench.errors import ConfigError, OutputError
from workbench.records import write_text

from .as_json import flip_lines, report_json
from .context import DETAILS, make_context
from .fitting import MISFIT, draw_fitting
from .load import RunFiles, load_run
from .text import FILTERS, clip, interval, visible
from .weights import Drawings

LIMIT_BYTES = 1_000_000
LARGE_LIMIT_BYTES = 2_000_000
LARGE_MATRICES = 20_000
PAGE = "report.html"
SCRIPTS = ("page.js", "tensors.js", "heatmap.js")
LONGEST_TEXT = 32_000  # characters of one text: more is no reading matter, and it must not fill the page


def build_report(run_dir: Path, out: Path | None = None, *, strict: bool = False) -> Path:
    """Write report.html, summary.md, report.json and (with a comparison) flips.jsonl; return the page's path.

    out: the folder for them (default: `run_dir`), or a name that ends in .html: report.html alone, there.

    Raises ConfigError when `run_dir` is no run folder (nothing is written then), OutputError. Files that cannot be
    read, or whose contents do not fit together, are left out and named on the pages; strict: OutputError names them
    as well, once the pages are written.
    """
    if not str(run_dir):
        raise ConfigError("'' is no run folder", fix="give the folder that a run printed")
    run_dir = Path(run_dir)
    out = run_dir if out is None else out
    files = load_run(run_dir)
    if not os.access(next(folder for folder in (out, *out.absolute().parents) if folder.exists()), os.W_OK):
        raise OutputError(f"{out} may not be written", fix="choose another folder: --out DIR")
    files, pages = draw_fitting(files, _render_pages, misfit=(*MISFIT, jinja2.TemplateError))
    alone = out.suffix == ".html"
    for name, text in pages.items():
        if name == PAGE or not alone:
            write_text(out if alone else out / name, text)
    if strict:
        files.refuse_damaged()
    return out if alone else out / PAGE


def content_policy(script: str) -> str:
    """The Content-Security-Policy of a page whose only script is `script`: no network, nothing else runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _render_pages(files: RunFiles) -> dict[str, str]:
    """Every page by file name; report.html in as much detail as fits."""
    drawings = Drawings()
    matrices = 0 if files.tensors is None else len(files.tensors)
    limit = LARGE_LIMIT_BYTES if matrices > LARGE_MATRICES else LIMIT_BYTES
    script = read_script(*SCRIPTS)
    for detail in DETAILS:
        context = make_context(files, detail=detail, drawings=drawings)
        tables = [section["table"] for section in context["pairs"]]
        page = context | {
            "script": Markup(script), "policy": Markup(content_policy(script)), "tables": Markup(as_data(tables)),
        }  # fmt: skip
        html = _environment(True).get_template(PAGE).render(page)
        if len(html.encode(errors="backslashreplace")) < limit:
            break
    pages = {
        "summary.md": _environment(False).get_template("summary.md").render(context),
        "report.json": report_json(context),
    }
    if files.comparison is not None:
        pages["flips.jsonl"] = flip_lines(files.comparison.tasks)
    return pages | {PAGE: html}


def as_data(value: Any) -> str:
    """JSON that is safe inside a <script> element: no text of it can close the element or open another."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def read_script(*names: str) -> str:
    """Scripts of templates/ as one, each in a scope of its own."""
    folder = package_files("workbench.reporting") / "templates"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


@functools.cache
def _environment(html: bool) -> jinja2.Environment:
    """The templates, compiled once a process."""
    return make_environment(html, _readable)


def make_environment(html: bool, finalize: Callable[[Any], Any]) -> jinja2.Environment:
    """Templates with the house's filters. html: escape; finalize: what every printed value passes."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("workbench.reporting"),
        autoescape=html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    environment.filters.update(FILTERS)
    environment.globals["interval"] = interval
    return environment


def _readable(value: Any) -> Any:
    """Any text that a template prints: of bounded length, nothing hidden in it."""
    return visible(clip(value, LONGEST_TEXT)) if type(value) is str else value
