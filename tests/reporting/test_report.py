"""The report of a sample run: complete, self-contained, safe, small, the same numbers in Markdown."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from workbench import cli
from workbench.errors import ConfigError
from workbench.reporting import build_report
from workbench.reporting.export import write_figures
from workbench.reporting.heatmap import make_heat_map

from .sample_run import HOSTILE


class Page(html.parser.HTMLParser):
    """Tags, ids and links of a page; void and unclosed elements are checked by the stack."""

    VOID = frozenset({"meta", "br", "img", "hr", "input", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack.pop() == tag, f"</{tag}> at {self.getpos()}"


@pytest.fixture(scope="module")
def page(sample_run: Path) -> str:
    return build_report(sample_run).read_text()


def test_page_is_well_formed_with_unique_ids_and_working_anchors(page: str) -> None:
    parsed = Page(page)
    assert parsed.stack == []
    ids = [attrs["id"] for _, attrs in parsed.tags if attrs.get("id")]
    assert len(ids) == len(set(ids))
    links = [attrs["href"] for tag, attrs in parsed.tags if tag == "a" and attrs.get("href")]
    assert links
    assert all(link is not None and link[1:] in ids for link in links)
    for reference in re.findall(r"(?:href=\"#|url\(#)([\w-]+)", page):
        assert reference in ids, reference


def test_page_needs_no_network_and_runs_its_own_script_alone(page: str) -> None:
    tags = Page(page).tags
    scripts = [attrs for tag, attrs in tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "tensor-data"}, {}]
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [a["content"] for _, a in tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'none'", "script-src": f"'sha256-{digest}'", "style-src": "'unsafe-inline'",
        "img-src": "data:", "base-uri": "'none'", "form-action": "'none'",
    }  # fmt: skip
    assert not [tag for tag, _ in tags if tag in ("link", "iframe", "object", "embed", "form", "base")]
    for _, attrs in tags:
        for key, value in attrs.items():
            assert not key.startswith("on"), (key, value)
            if key in ("src", "href", "xlink:href", "data"):
                assert value is not None
                assert value.startswith(("#", "data:image/png;base64,")), value[:60]
    assert "@import" not in page
    assert "url(http" not in page


def test_the_plan_is_shown_with_what_was_refused(page: str, sample_run: Path) -> None:
    summary = (sample_run / "summary.md").read_text()
    for text in (page, summary):
        assert "3.18 / 4.52 / 6.41" in text  # smallest detectable loss at 2, 4 and 8 % discordance
        assert str(120 * 380) in text
        assert "prompt-length" in text
    assert page.count('<span class="tag error">refused</span>') == 1
    assert "<code>9f2c11d0</code>" in page
    assert str(120 * 256) in page


def test_each_arm_says_what_made_it_lose_and_what_became_of_lost_answers(page: str, sample_run: Path) -> None:
    for arm in ("nvfp4", "nvfp4_to_mxfp4", "mxfp4_direct"):
        assert re.search(rf"{arm}</span> <span class=\"tag \w+\">[\w ]+</span> caught by ", page), arm
        assert f"- **{arm}**: " in (sample_run / "summary.md").read_text()
    assert "6 / 1<small>of 110</small>" in page


def test_hostile_answers_are_text(page: str, sample_run: Path) -> None:
    assert HOSTILE in (sample_run / "comparison.json").read_text().replace("\\'", "'")
    assert HOSTILE not in page
    assert "&lt;script&gt;alert" in page
    assert "<script" not in (sample_run / "summary.md").read_text()


def test_page_is_small_and_deterministic(page: str, sample_run: Path) -> None:
    assert len(page.encode()) < 1_000_000
    assert build_report(sample_run).read_text() == page


def test_every_section_shows_its_records(page: str, sample_run: Path) -> None:
    verdict = json.loads((sample_run / "verdict.json").read_text())
    comparison = json.loads((sample_run / "comparison.json").read_text())
    analysis = json.loads((sample_run / "analysis.json").read_text())
    markdown = (sample_run / "summary.md").read_text()
    text = page.replace("−", "-")
    for shown in (text, markdown.replace("−", "-")):
        assert verdict["policy_note"] in shown
        assert verdict["headline"].split(":")[0] in shown
        for task in comparison["tasks"]:
            assert f"{task['loss_upper95_pp']:.2f}" in shown
            assert f"{task['mde_pp']:.2f}" in shown
        for figure in ("sqnr_first_db", "sqnr_total_db", "sqnr_direct_db", "loss_to_direct_db"):
            assert f"{analysis['pairs'][0][figure]['pooled']:.2f}" in shown
        for claim in analysis["claims"]:
            assert f"{claim['measured']:.{2 if claim['unit'] else 3}f}" in shown
            assert claim["holds"] in shown
        assert "source_again is source again" in shown  # the noise floor, also when it is zero
        assert shown.count("0.0 %") >= 3
        assert "experiment=kimi_requant" in shown
    for heading in ("Flips", "Matrix products", "Published figures", "Lint", "What was run", "lm_eval run"):
        assert heading in page
    assert "uncalibrated-experts" in page
    assert "model.layers.2.mlp.experts.5.down_proj.weight:" in page  # a heat map cell's label


def test_artefacts_and_the_endpoints_behaviour_are_shown(page: str, sample_run: Path) -> None:
    for shown in (page, (sample_run / "summary.md").read_text()):
        assert "Artefacts" in shown
        assert "91.3 %" in shown  # of the finished answers
        assert "1.034" in shown  # length over the baseline's
        assert "61" in shown
    row = next(r for r in page.split("<tr>") if "nvfp4_to_mxfp4" in r and "1.034" in r)
    assert row.count('<td class="n">–</td>') == 0
    assert "–<small>" in row  # think tags: the client did not keep them
    assert "http_500 2<small>&lt;b&gt;Internal&lt;/b&gt; error" in page


def test_both_filters_of_one_task_are_shown(page: str) -> None:
    assert "strict-match" in page
    assert "flexible-extract" in page


def test_an_empty_run_folder_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    page = build_report(tmp_path).read_text()
    Page(page)
    for stage in ("gate", "evaluate", "compare", "analyze", "lint"):
        assert f"the {stage} stage left no file" in page
    assert "did not run" in (tmp_path / "summary.md").read_text()


@pytest.mark.parametrize(
    "missing",
    [
        "manifest.json", "config.yaml", "lint", "tensors.parquet", "gemm.parquet", "pooled.parquet", "fused.parquet",
        "analysis.json", "server", "eval", "comparison.json", "verdict.json",
    ],
)  # fmt: skip
def test_any_file_may_be_missing(sample_run: Path, tmp_path: Path, missing: str) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(sample_run, run_dir)
    target = run_dir / missing
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    assert Page(build_report(run_dir).read_text()).stack == []


def test_a_damaged_file_is_named(small_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(small_run, run_dir)
    (run_dir / "verdict.json").write_text('{"schema_version": 99}')
    (run_dir / "gemm.parquet").write_bytes(b"not parquet")
    page = build_report(run_dir).read_text()
    assert "verdict.json: Verdict: schema version 99" in page
    assert "gemm.parquet:" in page


@pytest.mark.parametrize("content", ["[1", "[1]", "{", "", "null", '"x"', "{}", '{"schema_version": 1, "pairs": [1]}'])
@pytest.mark.parametrize("name", ["verdict.json", "analysis.json", "comparison.json", "manifest.json"])
def test_damaged_json_is_named_on_both_pages(small_run: Path, tmp_path: Path, name: str, content: str) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(small_run, run_dir)
    (run_dir / name).write_text(content)
    page = build_report(run_dir).read_text()
    summary = (run_dir / "summary.md").read_text()
    assert f"{name}: " in page
    assert f"**Unreadable file:** {name}: " in summary
    assert "The gate did not run" not in summary
    assert Page(page).stack == []


def test_a_table_of_something_else_is_named(small_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(small_run, run_dir)
    pd.DataFrame({"a": [1]}).to_parquet(run_dir / "tensors.parquet")
    assert "tensors.parquet: its contents do not fit" in build_report(run_dir).read_text()


def test_an_arm_that_leaves_matrices_alone_is_drawn(sample_run: Path, tmp_path: Path) -> None:
    """Its second error is minus the first: a correlation of -1 up to rounding, and no error in total."""
    run_dir = tmp_path / "run"
    shutil.copytree(sample_run, run_dir)
    tensors = pd.read_parquet(run_dir / "tensors.parquet")
    tensors["corr_e1_e2"] = np.where(np.arange(len(tensors)) % 3, -1.0, -1.0 + 2.0**-52)
    tensors["sqnr_total_db"] = np.where(np.arange(len(tensors)) % 2, np.inf, tensors["sqnr_total_db"])
    tensors.to_parquet(run_dir / "tensors.parquet")
    page = build_report(run_dir, strict=True).read_text()
    assert "Histogram of the correlation of e1 and e2" in page
    assert any(path.name.startswith("correlation") for path in write_figures(run_dir, tmp_path / "figures"))


def test_a_pair_without_a_direct_arm_shows_no_price_of_rounding_twice(sample_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(sample_run, run_dir)
    analysis = json.loads((run_dir / "analysis.json").read_text())
    for name in ("sqnr_direct_db", "loss_to_direct_db"):
        analysis["pairs"][0][name] = {**dict.fromkeys(analysis["pairs"][0][name]), "count": 0}
    (run_dir / "analysis.json").write_text(json.dumps(analysis))
    before = (build_report(sample_run).read_text(), (sample_run / "summary.md").read_text())
    after = (build_report(run_dir, strict=True).read_text(), (run_dir / "summary.md").read_text())
    for label in ("price of rounding twice", "lost against direct, dB"):
        assert sum(label in text for text in before) > sum(label in text for text in after) == 0


def test_what_is_no_run_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    checkpoint, empty = tmp_path / "checkpoint", tmp_path / "empty"
    checkpoint.mkdir()
    empty.mkdir()
    (checkpoint / "config.json").write_text("{}")
    for folder in (checkpoint, empty, tmp_path / "none", checkpoint / "config.json", ""):
        with pytest.raises(ConfigError, match="no run folder"):
            build_report(folder)  # type: ignore[arg-type]
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["checkpoint", "config.json", "empty"]


def test_notes_of_the_comparison_stand_on_both_pages(small_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(small_run, run_dir)
    comparison = json.loads((run_dir / "comparison.json").read_text())
    comparison["notes"] = ["all 40 answers are empty <b>or null</b>"]
    (run_dir / "comparison.json").write_text(json.dumps(comparison))
    assert "<li>all 40 answers are empty &lt;b&gt;or null&lt;/b&gt;</li>" in build_report(run_dir).read_text()
    assert "- all 40 answers are empty" in (run_dir / "summary.md").read_text()


def test_very_many_flips_are_cut_to_the_limit(small_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(small_run, run_dir)
    comparison = json.loads((run_dir / "comparison.json").read_text())
    long = {"question": "q " * 2000, "baseline_answer": "a " * 2000, "candidate_answer": "b " * 2000}
    for task in comparison["tasks"]:
        task["flips"] = [
            {"task": task["task"], "filter": task["filter"], "doc_id": i, "direction": way, "target": "1"} | long
            for i in range(200)
            for way in ("lost", "gained")
        ]
    (run_dir / "comparison.json").write_text(json.dumps(comparison))
    page = build_report(run_dir).read_text()
    assert len(page.encode()) < 1_000_000
    assert page.count('id="flip-') == 50
    lines = [json.loads(line) for line in (run_dir / "flips.jsonl").read_text().splitlines()]
    assert len(lines) == 400 * len(comparison["tasks"])
    assert {line["baseline_answer"] for line in lines} == {"a " * 2000}
    assert "more: see flips.jsonl" in page


def test_heat_map_of_a_large_model_joins_experts_and_keeps_the_worst() -> None:
    rows = [
        {"name": f"model.layers.{layer}.mlp.experts.{e}.gate_proj.weight", "layer": layer, "expert": e,
         "projection": "gate_proj", "shared_expert": False, "sqnr_total_db": 17.0}
        for layer in range(60) for e in range(384)
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    frame.loc[5 * 384 + 100, "sqnr_total_db"] = 3.0
    heat_map = make_heat_map(frame, "sqnr_total_db", "title", budget=1000)
    assert heat_map is not None
    (panel,) = heat_map.panels
    assert len(panel.cells) <= 1100
    assert panel.joined == 24
    dark = [cell for cell in panel.cells if cell.step == 0]
    assert len(dark) == 1
    assert "experts.100.gate_proj.weight: 3.00 dB (worst of 24)" in dark[0].label
    assert make_heat_map(frame.assign(sqnr_total_db=np.nan), "sqnr_total_db", "title", budget=9) is None


def test_a_run_that_may_not_be_written_is_reported_elsewhere(
    small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(small_run, run_dir, ignore=shutil.ignore_patterns("summary.md", "flips.jsonl"))
    before = sorted(run_dir.rglob("*"))
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != run_dir and may(path, mode))
    assert cli.main(["report", str(run_dir), "--figures", str(tmp_path / "none")]) == 3
    assert f"{run_dir} may not be written" in (said := capsys.readouterr().err)
    assert "--out DIR" in said
    out = tmp_path / "out" / "run"
    assert cli.main(["report", str(run_dir), "--out", str(out), "--figures", str(tmp_path / "figures")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(out / "report.html"), str(tmp_path / "figures" / "figures.md")]
    assert sorted(p.name for p in out.iterdir()) == ["flips.jsonl", "report.html", "report.json", "summary.md"]
    page = tmp_path / "page.html"
    assert cli.main(["report", str(run_dir), "--out", str(page)]) == 0
    assert page.read_text() == (out / "report.html").read_text()
    assert sorted(run_dir.rglob("*")) == before


def test_figures_are_explained_where_they_stand(small_run: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(small_run, run_dir)
    for path in run_dir.glob("eval/*/*/preflight.json"):
        plan = json.loads(path.read_text())
        finding = {"id": "x", "level": "info", "message": "y"}
        few = dict.fromkeys(("0.02", "0.04", "0.08"), 26.42)
        plan |= {"findings": [finding], "tasks": [{**task, "mde_pp": few} for task in plan["tasks"]]}
        path.write_text(json.dumps(plan))
    server = run_dir / "server" / "source.json"
    server.write_text(
        json.dumps(json.loads(server.read_text()) | {"activation_format": "none", "activation_scale": "none"})
    )
    page, summary = build_report(run_dir).read_text(), (run_dir / "summary.md").read_text()
    assert "1 finding<" in page
    assert not re.search(r"\b1 findings", page + summary)
    assert "none none" not in summary
    for text in (page, summary):
        assert "26.42" in text
        assert "26.42 / 26.42" not in text
        assert "in which every flip is a loss" in text
        assert "times the probability outside" in text
        assert "kld.top_k" in text
