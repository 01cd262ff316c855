"""KL divergences of an experiment's arms, from their endpoints to the report's figure."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench import records
from workbench.composition import compose
from workbench.divergences import Divergences
from workbench.evaluation.spec import task_spec
from workbench.progress import Progress
from workbench.reporting.weight_figures import draw_divergences
from workbench.settings import Settings, read_settings

sys.path.insert(0, str(Path(__file__).parent / "evaluation"))
from fake_server import fake_server, logprob_of

TEXT = "The cat sat on the mat and counted 12 marbles. " * 60


def settings(*overrides: str) -> Settings:
    return read_settings(compose(["experiment=kimi_requant", "kld.tokens=16", "kld.windows=8", *overrides]))


def divergences(composed: Settings, folder: Path, notes: list[str], monkeypatch: pytest.MonkeyPatch) -> Divergences:
    monkeypatch.setattr(Progress, "note", lambda self, text: notes.append(text))
    tasks = tuple(task_spec({"name": name, **task}) for name, task in composed.eval.items())
    run: Any = SimpleNamespace(path=folder)
    return Divergences(settings=composed, folder=run, say=Progress(), tasks=tasks)


def shifted(token: int, before: int) -> float:
    return logprob_of(token, before) - (0.4 if token % 2 else 0.0)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_every_arm_is_set_against_the_baseline(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    found = divergences(settings(f"kld.text={text}"), tmp_path / "run", notes, monkeypatch)
    with fake_server(lambda prompt: "") as server:
        endpoint: Any = SimpleNamespace(base_url=f"{server.url}/v1", model="m")
        for arm in ("source", "source_again", "nvfp4"):
            server.logprob = shifted if arm == "nvfp4" else logprob_of
            found.collect(arm, endpoint, arm)
    found.compare()
    written = {path.stem: records.read_json(records.Divergence, path) for path in (tmp_path / "run/kld").glob("*.json")}
    assert set(written) == {"source_again", "nvfp4"}
    assert written["source_again"].mean.lower == 0
    assert written["nvfp4"].mean.lower > 0.001
    assert {d.positions for d in written.values()} == {8 * 15}
    assert {d.reference for d in written.values()} == {"source"}


def test_the_tasks_training_prompts_are_the_text_where_none_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    found = divergences(settings("analysis.prompts=2"), tmp_path, notes, monkeypatch)
    assert len(found._windows) == 8
    assert not notes


def test_an_endpoint_without_log_probabilities_is_said_and_left_out(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    found = divergences(settings(f"kld.text={text}"), tmp_path, notes, monkeypatch)
    with fake_server(lambda prompt: "") as server:
        server.echo = False
        found.collect("source", SimpleNamespace(base_url=f"{server.url}/v1", model="m"), "")  # type: ignore[arg-type]
    found.compare()
    assert len(notes) == 1
    assert notes[0].startswith("source: no KL divergence: ")
    assert not list((tmp_path / "kld").glob("*"))


def test_an_arm_whose_log_probabilities_are_gone_is_noted_and_has_no_stale_divergence(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    found = divergences(settings(f"kld.text={text}"), tmp_path, notes, monkeypatch)
    with fake_server(lambda prompt: "") as server:
        endpoint: Any = SimpleNamespace(base_url=f"{server.url}/v1", model="m")
        for arm in ("source", "source_again", "nvfp4"):
            found.collect(arm, endpoint, arm)
            (tmp_path / "eval" / arm).mkdir(parents=True)
            (tmp_path / "eval" / arm / "scores.json").write_text("{}")
    found.compare()
    notes.clear()
    (tmp_path / "kld" / "nvfp4.jsonl").unlink()
    (tmp_path / "kld" / "source_again.jsonl").write_text("no log-probabilities\n")
    found.compare()
    assert [note.split(":")[0] for note in notes] == ["nvfp4", "source_again"]
    assert "kld/nvfp4.jsonl is missing (delete eval/nvfp4 to ask it again)" in notes[0]
    assert not list((tmp_path / "kld").glob("*.json"))
    (tmp_path / "kld" / "source.jsonl").unlink()
    found.compare()
    assert "source: no KL divergence" in notes[2]


def test_no_windows_ask_nothing_and_a_short_text_is_said(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    nowhere: Any = SimpleNamespace(base_url="http://127.0.0.1:9/v1", model="m")
    divergences(settings("kld.windows=0"), tmp_path, notes, monkeypatch).collect("source", nowhere, "")
    assert not notes
    few = divergences(settings("kld.windows=9999", f"kld.text={text}"), tmp_path, notes, monkeypatch)._windows
    assert 20 < len(few) < 200
    assert {len(window) for window in few} == {16}
    text.write_text("Too short.")
    divergences(settings(f"kld.text={text}"), tmp_path, notes, monkeypatch).collect("source", nowhere, "")
    assert len(notes) == 1
    assert "windows of 16 need" in notes[0]


def divergence(arm: str, mean: float) -> records.Divergence:
    def bounded(value: float) -> records.Bounded:
        ends = {"lower_ci_low": 0.9 * value, "lower_ci_high": 1.1 * value, "upper_ci_low": 8.0, "upper_ci_high": 10.0}
        return records.Bounded(lower=value, upper=9.0, **ends)

    return records.Divergence(
        reference="source", arm=arm, k=20, windows=8, positions=100, mean=bounded(mean), median=bounded(mean),
        p99=bounded(mean), p999=bounded(mean), floor_nats=100.0, tail_mass_reference=0.1, tail_mass_arm=0.1,
        same_top1=0.9, same_top1_low=0.8, same_top1_high=0.95, delta_p_mean_pp=0.0, delta_p_mean_low_pp=-1.0,
        delta_p_mean_high_pp=1.0, text_fingerprint="t",
    )  # fmt: skip


def test_the_figure_sets_divergence_against_the_noise_of_the_products() -> None:
    arms = [divergence("nvfp4", 0.02), divergence("requant", 0.05), divergence("unknown", 0.07)]
    gemm = [
        {"arm": "nvfp4", "kind": "weight", "sqnr_db": {"mean": 21.5}},
        {"arm": "nvfp4", "kind": "both", "sqnr_db": {"mean": 20.0}},
        {"arm": "requant", "kind": "both", "sqnr_db": {"mean": 17.0}},
    ]
    svg = draw_divergences(arms, gemm, {"nvfp4": "#4f86c6", "requant": "#ee6677"})
    assert svg.startswith("<svg")
    assert "nvfp4" in svg
    assert "requant" in svg
    assert "unknown" not in svg
    assert draw_divergences(arms[:1], gemm, {}) == ""
    assert draw_divergences(arms, [], {}) == ""
