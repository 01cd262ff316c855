"""The arrows of docs/architecture.md: a room imports only what lies beneath it, and light rooms stay light."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENEATH = {
    "records": set(),
    "kernels": set(),
    "formats": {"kernels"},
    "checkpoints": {"formats", "kernels"},
    "statistics": set(),
    "serving": {"checkpoints", "formats", "kernels"},
    "analysis": {"checkpoints", "formats", "kernels", "statistics"},
    "evaluation": {"statistics", "mini_models"},
    "comparison": {"statistics"},
    "gating": {"statistics"},
    "reporting": set(),
    "bench": {"checkpoints", "formats", "kernels", "serving", "statistics"},
}
# The files beside the rooms, from the entry points down: each may import those that come later. commands is a folder.
FILES = ("cli", "run", "commands", "experiment", "arm_evaluation", "divergences", "arms", "settings", "composition",
         "runfolder", "progress", "flags", "entry", "interrupt", "errors")  # fmt: skip
EVERYONE = {"errors", "interrupt", "records"}


def imported(path: Path) -> Iterator[str]:
    """Rooms of the workbench that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            root = node.module == "workbench"
            names = [f"workbench.{alias.name}" if root else str(node.module) for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("workbench."))


def files_of(name: str) -> list[Path]:
    """The files of a room, or the one file of that name beside the rooms."""
    spec = importlib.util.find_spec(f"workbench.{name}")
    assert spec is not None
    assert spec.origin is not None
    origin = Path(spec.origin)
    return sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin]


@pytest.mark.parametrize("room", BENEATH)
def test_a_room_imports_only_what_lies_beneath_it(room: str) -> None:
    files = files_of(room)
    allowed = BENEATH[room] | EVERYONE | {room}
    wrong = {f"{file.name} -> {name}" for file in files for name in imported(file) if name not in allowed}
    assert not wrong


@pytest.mark.parametrize("name", FILES)
def test_a_file_beside_the_rooms_imports_only_those_that_come_after_it(name: str) -> None:
    before = FILES[: FILES.index(name)]
    assert not [other for file in files_of(name) for other in imported(file) if other in before]


def test_every_file_beside_the_rooms_has_its_place() -> None:
    (cli,) = files_of("cli")
    assert {path.stem for path in cli.parent.glob("*.py")} == {"__init__", *FILES} - {"commands"}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("workbench.cli", ("torch", "vllm", "lm_eval", "transformers", "pandas", "hydra", "omegaconf")),
        ("workbench.run", ("torch", "vllm", "lm_eval", "transformers", "pandas")),
        ("workbench.statistics", ("torch", "vllm", "lm_eval", "pandas")),
        ("workbench.gating", ("torch", "vllm", "lm_eval")),
        ("workbench.comparison", ("torch", "vllm", "lm_eval")),
        ("workbench.reporting", ("torch", "vllm", "lm_eval")),
        ("workbench.serving.vllm_plugin", ("torch", "vllm", "transformers")),
    ],
)
def test_importing_stays_light(module: str, heavy: tuple[str, ...]) -> None:
    script = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
