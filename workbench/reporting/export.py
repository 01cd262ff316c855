"""`write_figures(run_dir)`: every figure of a run as PNG and SVG for papers and slides, with a caption file.

    paths = write_figures(Path("reports/kimi_requant/2026-10-01_120000"))     # into its figures/

PNG has 300 dots an inch; SVG keeps text as text, so that a paper's own fonts can take over. White page, colours that
readers with any colour vision tell apart, units and n in the labels. figures.md says for each figure what it shows,
which record file it was drawn from, and the commands that made the record and the figure.
"""

from __future__ import annotations

import io
import shlex
from pathlib import Path

from workbench.errors import ConfigError
from workbench.records import write_bytes, write_text

from .export_answers import draw_answers
from .export_style import STYLE, PaperFigure
from .export_weights import draw_weights
from .fitting import draw_fitting
from .load import RunFiles, load_run
from .text import cell

DPI = 300


def write_figures(run_dir: Path, out: Path | None = None) -> list[Path]:
    """Write the figures of `run_dir` into `out` (default: its figures/) and return the paths, figures.md last.

    Raises ConfigError when `run_dir` is no run folder or holds nothing to draw; OutputError, also once the figures are
    written where a file of the run cannot be read.
    """
    import matplotlib

    out = run_dir / "figures" if out is None else out
    written: list[Path] = []
    captions: list[str] = []
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **STYLE, "backend": "agg"}):
        files, figures = draw_fitting(load_run(run_dir), lambda files: [*draw_answers(files), *draw_weights(files)])
        for figure in figures:
            for ending in ("png", "svg"):
                path = out / f"{figure.name}.{ending}"
                write_bytes(path, render(figure, ending))
                written.append(path)
            captions.append(_caption(figure))
    if not written:
        files.refuse_damaged()
        raise ConfigError(
            f"{run_dir} holds nothing to draw: no scores, no comparison, no analysis",
            fix="run one of the stages evaluate, compare or analyze",
        )
    write_text(out / "figures.md", _captions_file(files, captions, out))
    files.refuse_damaged()
    return [*written, out / "figures.md"]


def render(figure: PaperFigure, ending: str) -> bytes:
    """The bytes of a "png" or "svg": the same for the same records, without a date."""
    dated = {"Date": None} if ending == "svg" else {"Software": None}
    buffer = io.BytesIO()
    figure.figure.savefig(buffer, format=ending, dpi=DPI, metadata={"Title": figure.title, **dated})
    return buffer.getvalue()


def _caption(figure: PaperFigure) -> str:
    sources = ", ".join(f"`{source}`" for source in figure.sources)
    return (
        f"## {figure.title}\n\n![{figure.title}]({figure.name}.svg)\n\n{cell(figure.caption)}\n\n"
        f"Files: `{figure.name}.png`, `{figure.name}.svg`. Drawn from {sources}.\n"
    )


def _captions_file(files: RunFiles, captions: list[str], out: Path) -> str:
    manifest = files.manifest
    command = shlex.join(manifest.command) if manifest else ""
    redraw = ["workbench", "report", str(files.run_dir), "--figures"]
    if out.resolve() != (files.run_dir / "figures").resolve():
        redraw.append(str(out))
    made = f"The records were made by\n\n    {command}\n\n" if command else "The run has no manifest.json.\n\n"
    name = manifest.experiment if manifest else files.run_dir.name
    started = f" of {manifest.started}" if manifest else ""
    return (
        f"# Figures: {cell(name)}{started}\n\n{made}and the figures by\n\n    {shlex.join(redraw)}\n\n"
        f"Record files are relative to the run folder.\n\n" + "\n".join(captions)
    )
