"""Every command in the documentation: run here where a laptop can, else parsed and marked with what it needs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from workbench import cli
from workbench.composition import compose
from workbench.settings import read_settings

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("experiments/*/README.md")])
_BLOCK = re.compile(r"(?:<!-- (needs|run by): ([^\n]*?) -->\n)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
GUIDES = ["docs/tutorial.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/howto/*.md"))]


@dataclass(frozen=True)
class Block:
    page: Path
    mark: str
    why: str
    language: str
    commands: tuple[str, ...]


def blocks(page: Path) -> list[Block]:
    found = []
    for mark, why, language, text in _BLOCK.findall(page.read_text()):
        lines = re.sub(r"\\\n\s*", " ", text).splitlines()
        kept = [line.split(" # ")[0].strip() for line in lines]
        commands = tuple(line for line in kept if line.startswith(("workbench ", "python ", "make ")))
        if commands:
            found.append(Block(page, mark, why, language, commands))
    return found


ALL = [block for page in PAGES for block in blocks(page)]
COMMANDS = sorted({command for block in ALL for command in block.commands})


def test_the_documentation_has_commands() -> None:
    assert len(COMMANDS) > 40
    assert {"README.md", "tutorial.md", "evaluation.md"} <= {block.page.name for block in ALL}


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("workbench ")])
def test_the_workbench_knows_the_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)[1:]
    try:
        arguments = cli._parser().parse_args(words)
    except SystemExit as stop:
        code, printed = stop.code, capsys.readouterr().err
    else:
        code, printed = 0, ""
        assert callable(arguments.command)
    assert code == 0, f"{command}\n{printed}"


@pytest.mark.parametrize("block", [b for b in ALL if any(" gate " in c for c in b.commands)], ids=lambda b: b.page.name)
def test_an_arm_that_a_block_compares_or_gates_was_evaluated_and_analyzed_in_it(block: Block) -> None:
    parsed = [cli._parser().parse_args(shlex.split(c)[1:]) for c in block.commands if c.startswith("workbench ")]
    evaluated = {a.arm for a in parsed if a.command is cli.answers.evaluate}
    analyzed = [{a.first_arm, a.second_arm} for a in parsed if a.command is cli.analysis.analyze]
    for arguments in parsed:
        if evaluated and arguments.command is cli.judging.gate:
            assert set(arguments.gated) <= evaluated
            assert all(set(arguments.gated) <= arms for arms in analyzed)
        if evaluated and arguments.command is cli.judging.compare and arguments.candidate is None:
            assert (arguments.baseline_arm or "source") in evaluated


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python -m workbench.run")])
def test_the_front_door_composes_the_command(command: str) -> None:
    words = shlex.split(command)[3:]
    if {"--help", "--cfg"} & set(words):
        words = [word for word in words if "=" in word]
    overrides = [word for word in words if not word.startswith(("--", "hydra/", "hydra.", "resume="))]
    first = [re.sub(r"^(model|seed)=([^,\[]+),.*", r"\1=\2", word) for word in overrides]  # a sweep's first job
    read_settings(compose(first or ["experiment=kimi_requant"]))


@pytest.mark.parametrize("command", [c for c in COMMANDS if re.match(r"python [\w/]+\.py", c)])
def test_the_script_is_there(command: str) -> None:
    assert (ROOT / shlex.split(command)[1]).is_file(), command


def test_what_make_is_asked_for_is_a_target() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {word for c in COMMANDS if c.startswith("make ") for word in shlex.split(c)[1:] if "=" not in word}
    assert {"demo", "test"} <= asked <= targets


@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_runs_as_it_stands(page: str, tmp_path: Path) -> None:
    """What is not marked runs, in order, in a folder of its own beside the shipped model; marks say why not."""
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    program = shutil.which("workbench", path=str(Path(sys.executable).parent)) or "workbench"
    ran = 0
    for block in blocks(ROOT / page):
        if block.mark:
            assert block.why, block
            assert block.mark == "needs" or (ROOT / block.why).is_file(), block
            continue
        for command in block.commands:
            words = [program, *shlex.split(command)[1:]]
            done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            ran += 1
    assert ran or page != "docs/tutorial.md"


def test_the_pages_build_without_a_dangling_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "site/tutorial/index.html").is_file()
