"""A run's config.yaml: read once, as OmegaConf reads it; what is none, or half of one, is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from workbench.composition import compose, resolved_yaml
from workbench.reporting import build_report, settings
from workbench.reporting.index import build_index
from workbench.reporting.load import load_run
from workbench.reporting.settings import read_settings

DAMAGED = {
    "null": "null\n", "a text": '"x"\n', "a word": "x\n", "a number": "NaN\n", "a list": "[1]\n",
    "a tag": "!!python/none\n",
    "nothing": "{}\n", "space": " \n", "no name": "arms: {}\n", "a number for a name": "name: 5\n", "no YAML": "a: [\n",
    "twice": "name: x\nname: y\n", "the end cut off": "name: x\narms:\n  sour", "nested deeply": "[" * 100_000 + "\n",
}  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_what_is_no_configuration_is_named(small_run: Path, tmp_path: Path, text: str) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(small_run, run_dir)
    (run_dir / "config.yaml").write_text(text)
    files = load_run(run_dir)
    assert [problem.partition(": ")[0] for problem in files.problems] == ["config.yaml"]
    assert (files.config, files.settings) == ("", {})
    assert files.arms()  # those that left files


def test_half_of_a_runs_own_configuration_is_named(small_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(small_run, run_dir)
    text = resolved_yaml(compose(["experiment=kimi_requant"]))
    (run_dir / "config.yaml").write_text(text[: len(text) // 2])
    assert "Unreadable file:</strong> config.yaml: " in build_report(run_dir).read_text()


@pytest.mark.parametrize("experiment", ["kimi_requant", "file_to_file_mxfp4"])
def test_a_runs_own_configuration_is_read_as_omegaconf_reads_it(experiment: str) -> None:
    text = resolved_yaml(compose([f"experiment={experiment}"]))
    assert read_settings(text) == OmegaConf.to_container(OmegaConf.create(text))


def test_scalars_and_interpolations_are_read_as_omegaconf_reads_them() -> None:
    text = "name: x\na: 1e-05\nb: 2026-10-01\nc: 1e5\nd: 0x10\ne: yes\nf: 1_000\ng: .inf\nh: '5'\ni: ~\nj: 12:30:45\n"
    assert json.dumps(read_settings(text)) == json.dumps(OmegaConf.to_container(OmegaConf.create(text)))
    assert read_settings("name: x\na: ${name}\n") == {"name": "x", "a": "x"}
    assert read_settings("name: x\na: ${unknown:1}\n") == {"name": "x", "a": "${unknown:1}"}


def test_the_index_reads_each_configuration_once(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in "abc":
        shutil.copytree(small_run, tmp_path / "runs" / run)
    read: list[str] = []
    load = settings.yaml.load
    monkeypatch.setattr(settings.yaml, "load", lambda text, Loader: read.append(text) or load(text, Loader=Loader))
    monkeypatch.setattr(OmegaConf, "create", lambda *_: pytest.fail("what is resolved already is given to OmegaConf"))
    build_index(tmp_path / "runs")
    assert len(read) == 3
