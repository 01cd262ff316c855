"""The workflow that users copy: it is YAML, its steps run in order, and every command in it is one that exists."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from workbench import cli
from workbench.composition import compose, read_policy_file
from workbench.gating import read_policy

ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / "docs" / "ci" / "quantization-gate.yml"


@pytest.fixture(scope="module")
def steps() -> list[dict[str, Any]]:
    content = yaml.safe_load(WORKFLOW.read_text())
    assert set(content) == {"name", True, "permissions", "jobs"}  # YAML 1.1 reads `on` as true
    assert set(content[True]) == {"pull_request", "workflow_dispatch"}
    (job,) = content["jobs"].values()
    assert job["timeout-minutes"] >= 30
    return list(job["steps"])


def lines(steps: list[dict[str, Any]], program: str) -> list[list[str]]:
    """The arguments of every call of a program in the steps' scripts."""
    found = []
    for step in steps:
        for line in str(step.get("run", "")).splitlines():
            if program in line:
                words = shlex.split(line.split(program, 1)[1].split("||")[0])
                found.append([word for word in words if "${against" not in word])
    return found


def test_every_script_is_sound_shell(steps: list[dict[str, Any]]) -> None:
    scripts = [step["run"] for step in steps if "run" in step]
    assert len(scripts) == 4
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    for step in steps:
        assert ("run" in step) != bool(re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "")))


def test_its_commands_are_commands_of_the_workbench(steps: list[dict[str, Any]]) -> None:
    called = lines(steps, ".venv/bin/workbench ")
    assert [words[0] for words in called] == ["gate", "report"]
    parsed = cli._parser().parse_args(called[0])  # an unknown flag would exit
    policy = read_policy({**read_policy_file(parsed.policy), "gated": parsed.gated, "reported": parsed.reported})
    (overrides,) = lines(steps, "-m workbench.run ")
    config = compose(overrides)
    assert {*policy.gated, *policy.reported} <= set(config.arms)
    assert config.name == "kimi_requant"
    assert "reports/kimi_requant/" in WORKFLOW.read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{words[0]}:" in makefile for words in lines(steps, "make "))


def test_the_gates_outputs_are_kept_whatever_the_verdict(steps: list[dict[str, Any]]) -> None:
    order = [step.get("name", step.get("uses")) for step in steps]
    assert order.index("Run the mini experiment") < order.index("Gate") < order.index("Report")
    upload = next(step for step in steps if "upload-artifact" in step.get("uses", ""))
    assert upload["if"].startswith("always()")
    for name in ("junit.xml", "verdict.json", "report.html", "summary.md"):
        assert f"/{name}" in upload["with"]["path"]
