"""`workbench report`: a run's page, several runs side by side, an index of all; shown in a browser where asked for."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from workbench.commands.arguments import Commands, Parser, add_command, to_path, whole
from workbench.commands.paths import check_file, check_folder
from workbench.errors import ConfigError


def add_commands(commands: Commands) -> None:
    help = "render a run's page; several runs side by side; an index of all runs"
    add_command(commands, "report", report, _report_options, help)


def _report_options(parser: Parser) -> None:
    parser.add_argument(
        "runs", type=to_path, nargs="*", metavar="RUN", help="one: its report.html; several: side by side"
    )
    parser.add_argument(
        "--out", type=to_path, metavar="PATH", help="one run: a folder, or the page FILE.html; several: comparison.html"
    )
    parser.add_argument(
        "--figures",
        type=to_path,
        nargs="?",
        const=Path(),
        metavar="DIR",
        help="also every figure as PNG and SVG; default RUN/figures",
    )
    parser.add_argument(
        "--index", type=to_path, metavar="DIR", help="write DIR/index.html, a list of all runs below it"
    )
    parser.add_argument("--serve", action="store_true", help="show it at 127.0.0.1 until Ctrl-C; no RUN: the index")
    parser.add_argument("--port", type=whole(0, 65535), help="of --serve: default 8600; 0: any free one")
    parser.add_argument(
        "--open",
        action=argparse.BooleanOptionalAction,
        help="open a browser at it; default: where there is a desktop",
    )


def report(arguments: argparse.Namespace) -> int:
    """One run's page, several runs' comparison, an index, figures; then served, where asked for."""
    from workbench.reporting import build_report

    runs, served = arguments.runs, arguments.serve
    if arguments.figures is not None and len(runs) != 1:
        raise ConfigError("--figures draws one run", fix="name it first: workbench report RUN --figures [DIR]")
    if not runs and not arguments.index and not served:
        raise ConfigError("there is nothing to report", fix="give a run folder, --index DIR, or --serve")
    if arguments.index and runs:
        raise ConfigError("--index lists a folder, and RUN is given too", fix="drop one of them")
    if arguments.out and (not runs or (served and len(runs) == 1)):
        other = "--serve shows the run's own pages" if runs else "--out is of a run's page, or of several runs'"
        raise ConfigError(other, fix="drop --out" if runs else "name a run, or drop --out")
    for flag, value in (("--port", arguments.port), ("--open", arguments.open)):
        if value is not None and not served:
            raise ConfigError(f"{flag} is of --serve, which is not given", fix=f"add --serve, or drop {flag}")
    figures, folder = arguments.figures, runs[0] if runs else Path()
    if arguments.out and len(runs) == 1:
        folder = arguments.out.parent if arguments.out.suffix == ".html" else arguments.out
        check_folder("--out", folder)
    if figures is not None:
        figures = figures if figures.parts else folder / "figures"
        check_folder("--figures", figures)
    if len(runs) == 1:
        print(build_report(runs[0], arguments.out, strict=not served))
    elif runs and (arguments.out or not served):
        from workbench.reporting.side_by_side import build_comparison

        out = arguments.out or Path("comparison.html")
        check_file("--out", out, *runs)
        print(build_comparison(runs, out))
    elif arguments.index:
        from workbench.reporting.index import build_index

        print(build_index(arguments.index))
    if figures is not None:
        from workbench.reporting.export import write_figures

        print(write_figures(runs[0], figures)[-1])
    if served:
        from workbench.reporting import server

        lookup = server.pages_of_runs(runs) if runs else server.pages_of_folder(arguments.index or Path("reports"))
        port = 8600 if arguments.port is None else arguments.port
        server.serve(lookup, port, open_browser=_wants_browser(arguments.open))
    return 0


def _wants_browser(asked: bool | None) -> bool:
    """Without a word for or against it: on a desktop, where a browser does not take over the terminal."""
    desktop = sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ))
    return asked if asked is not None else desktop and sys.stdout.isatty()
