"""The `workbench` command: one stage at a time, on plain paths.

    workbench lint PATH
    workbench quantize SRC DST --format nvfp4 --dialect modelopt --exclude '*self_attn*' --calibrate
    workbench quantize SRC DST --recipe kimi_k2_6_nvfp4 --dialect modelopt --jobs 2 --resume
    workbench serve PATH --backend emulation
    workbench numerics PATH --backend stock
    workbench analyze --source SOURCE --first FIRST --second mxfp4 --out FOLDER
    workbench evaluate URL --model NAME --tokenizer PATH --task gsm8k_mini --out FOLDER
    workbench report RUN --figures
    workbench report RUN RUN --serve
    workbench bench kernels --device cpu
    workbench bench serve --requant CHECKPOINT --format mxfp4 --out FOLDER

Exit codes: 0 done (or clean, or pass), 1 lint findings or a regression, 2 inconclusive or invalid, 3 could not run:
also for a bad flag. What each command takes and does: `workbench.commands`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import workbench
from workbench.commands import (
    analysis,
    answers,
    bench,
    calibration,
    checkpoints,
    judging,
    mixed_precision,
    report,
    serving,
    whatif,
)
from workbench.commands.arguments import Parser
from workbench.entry import explain, safe_streams
from workbench.errors import WorkbenchError
from workbench.flags import in_flags
from workbench.interrupt import terminable

# As --help lists them.
GROUPS = (checkpoints, calibration, analysis, mixed_precision, whatif, serving, answers, judging, report, bench)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code. --help and --version exit 0."""
    safe_streams()
    try:
        code = _run(argv)
        sys.stdout.flush()  # a full disk or a reader that has gone is found here, not at the interpreter's end
        return code
    except BaseException as error:
        return explain(error, again="run it again")


def _run(argv: list[str] | None) -> int:
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as stop:  # --help, --version, or a bad flag
        return stop.code if isinstance(stop.code, int) else 0
    command: Callable[[argparse.Namespace], int] = arguments.command
    with terminable():
        try:
            return command(arguments)
        except WorkbenchError as error:
            known = vars(arguments).keys()
            error.message, error.fix = in_flags(error.message, known), in_flags(error.fix, known)
            raise


def _parser() -> Parser:
    parser = Parser(prog="workbench", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--version", action="version", version=f"workbench {workbench.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for group in GROUPS:
        group.add_commands(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
