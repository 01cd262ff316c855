"""The parser of every command, and the values that flags take.

    add_command(commands, "lint", lint, _lint_options, "check a checkpoint's bytes against its own claims")
    parser.add_argument("--windows", type=whole(1, MOST))

A command's options are added when it is the one that was asked for, so they may name choices whose import takes time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias

from workbench.entry import COULD_NOT_RUN

MOST = 1_000_000  # of whatever is counted: above it lies a typing mistake
MOST_TOKENS = (1 << 31) - 1
Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


class Parser(argparse.ArgumentParser):
    """argparse exits 2 on a bad flag; 2 means "inconclusive" here. options: adds what the command takes, once it is
    parsed. epilog_of: what only --help takes time to say.
    """

    options: Callable[[Parser], None] | None = None
    epilog_of: Callable[[], str] | None = None

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        if (add := self.options) is not None:
            self.options = None  # once: argparse would refuse an option that is added twice
            add(self)
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        if self.epilog_of is not None:
            self.epilog = self.epilog_of()
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(COULD_NOT_RUN, f"error: {message}\n  fix: see `{self.prog} --help`\n")


def add_command(
    commands: Commands,
    name: str,
    command: Callable[[argparse.Namespace], int],
    options: Callable[[Parser], None],
    help: str,
    description: str = "",
) -> None:
    """One command of a parser. command: does it and returns the exit code. description: of its own --help."""
    parser = commands.add_parser(name, help=help, description=description or help)
    parser.set_defaults(command=command)
    parser.options = options


def whole(least: int, most: int) -> Callable[[str], int]:
    """A whole number within bounds."""

    def number(text: str) -> int:
        if not text.removeprefix("-").isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return int(text)

    return number


def to_bits(text: str) -> float:
    """Bits a weight, 1 to 32."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 32:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bits from 1 to 32")
    return value


def to_text(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def to_path(text: str) -> Path:
    return Path(to_text(text))


def to_pair(item: str) -> tuple[str, str]:
    key, sign, value = item.partition("=")
    if not sign or not key:
        raise argparse.ArgumentTypeError(f"{item!r} is not KEY=VALUE, e.g. max_num_seqs=64")
    return key, value


def to_block(text: str) -> tuple[int, int]:
    """`128x128` as (rows, columns)."""
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) > 0 and int(columns) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not ROWSxCOLUMNS")
    return int(rows), int(columns)
