"""Several runs on one page: every figure a record's, and set beside another only where that means something."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from workbench.errors import ConfigError, OutputError
from workbench.records import Comparison, read_json, write_json
from workbench.reporting import build_report
from workbench.reporting.comparable import comparable, machine_setting
from workbench.reporting.load import load_run
from workbench.reporting.side_by_side import build_comparison, make_comparison

from .test_report import Page
from .test_serving_cost import cost
from .variants import edit, make_variants, opened

HOSTILE = "</script><img src=x onerror=alert(1)>"


class Cells(HTMLParser):
    """{(entry, figure): data attributes} of the figures' cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.entry, self.found = "", dict[tuple[str, str], dict[str, str]]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {key: value or "" for key, value in attrs}
        if tag == "tr":
            self.entry = named.get("data-entry", "")
        elif "data-f" in named:
            self.found[self.entry, named["data-f"]] = named


@pytest.fixture(scope="module")
def runs(sample_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = make_variants(sample_run, tmp_path_factory.mktemp("side") / "reports")
    (found["first"] / "report.html").write_text("<!DOCTYPE html><title>the report</title>")
    return found


@pytest.fixture(scope="module")
def page(runs: dict[str, Path]) -> Path:
    return build_comparison([runs[name] for name in ("first", "again", "other")], runs["first"].parent / "compare.html")


def test_every_figure_is_a_records(runs: dict[str, Path], page: Path) -> None:
    text = page.read_text()
    assert Page(text).stack == []
    cells = Cells(text).found
    checked = 0
    for letter, name in zip("ABC", ("first", "again", "other"), strict=True):
        files = load_run(runs[name], tables=False)
        for arm, evaluation in files.evaluations.items():
            for s in evaluation.scores:
                cell = cells[f"{letter}.{arm}", f"score|{s.task}|{s.filter}|{s.metric}"]
                assert float(cell["data-v"]) == s.value
                checked += 1
        for arm, server in files.servers.items():
            assert float(cells[f"{letter}.{arm}", "load"]["data-v"]) == server.load_s
            assert float(cells[f"{letter}.{arm}", "weight-bytes"]["data-v"]) == server.weight_bytes
        assert files.analysis is not None
        pair = files.analysis["pairs"][0]
        assert float(cells[f"{letter}.nvfp4_to_mxfp4", "sqnr"]["data-v"]) == pair["sqnr_total_db"]["pooled"]
        assert float(cells[f"{letter}.nvfp4", "sqnr"]["data-v"]) == pair["sqnr_first_db"]["pooled"]
        assert float(cells[f"{letter}.nvfp4_to_mxfp4", "corr"]["data-v"]) == pair["corr_e1_e2"]["mean"]
    assert checked == 45
    assert "[75.7, 88.9]" in text


def test_what_differs_is_listed_and_nothing_else(runs: dict[str, Path], page: Path) -> None:
    text = page.read_text()
    section = text[text.index('id="differences"') : text.index('id="scores-0"')]
    assert '<th scope="row">seed</th><td>–</td><td>–</td><td>3</td>' in section
    assert "another machine" in section
    assert "package torch" in section
    assert "kimi_requant" not in section  # the same in all
    same = build_comparison([runs["first"], runs["again"]], runs["first"].parent / "same.html").read_text()
    assert "are the same." in same[same.index('id="differences"') : same.index('id="scores-0"')]


def test_recorded_pairings_show_without_a_script(runs: dict[str, Path], page: Path) -> None:
    text = page.read_text().replace("−", "-")
    assert "<noscript>" in text
    for task in read_json(Comparison, runs["first"] / "comparison.json").tasks:
        assert (
            f"{task.loss_pp:+.2f}".replace("+0.00", "0.00") + f" [{task.loss_low_pp:.2f}, {task.loss_high_pp:.2f}]"
            in text
        )


def test_the_run_links_to_its_report(runs: dict[str, Path], page: Path) -> None:
    links = [attrs["href"] for tag, attrs in Page(page.read_text()).tags if tag == "a" and "href" in attrs]
    assert [link for link in links if link and link[0] != "#"] == ["first/report.html"]
    assert (page.parent / "first/report.html").is_file()


def test_what_is_no_comparison_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    for wrong in ([runs["first"]], [runs["first"], runs["first"] / "../first"]):
        with pytest.raises(ConfigError, match="two runs or more"):
            build_comparison(wrong, out)
    with pytest.raises(ConfigError, match="more than a page holds"):
        build_comparison([tmp_path / str(n) for n in range(27)], out)
    with pytest.raises(ConfigError, match="no run folder"):
        build_comparison([runs["first"], tmp_path], out)
    assert not out.exists()


def test_a_damaged_run_is_named_on_the_page_and_by_the_command(runs: dict[str, Path], tmp_path: Path) -> None:
    misfit = tmp_path / "misfit"
    shutil.copytree(runs["first"], misfit)
    (misfit / "analysis.json").write_text('{"schema_version": 1, "pairs": [{"source_arm": 1}]}')
    out = tmp_path / "page.html"
    with pytest.raises(OutputError) as error:
        build_comparison([runs["damaged"], misfit], out)
    for text in (str(error.value), out.read_text()):
        assert "verdict.json: " in text
        assert "analysis.json: its contents do not fit" in text


def test_what_a_run_does_not_say_is_a_dash(runs: dict[str, Path], tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "page.html"
    shutil.copytree(runs["first"], run)
    edit(run / "manifest.json", checkpoints={"weights": {"model_type": "x"}}, cpu="")
    build_comparison([runs["first"], run], out)
    differences = out.read_text().partition('id="differences"')[2].partition("</section>")[0]
    assert "<td></td>" not in differences
    assert re.search(r'<th scope="row">processor</th><td>[^<–]+</td><td>–</td>', differences)


def test_names_of_anyone_are_text(runs: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["first"], run)
    scores = run / "eval" / "nvfp4" / "scores.json"
    edit(scores, scores=[{**row, "task": HOSTILE} for row in json.loads(scores.read_text())["scores"]], harness=HOSTILE)
    edit(run / "server" / "nvfp4.json", engine_version=HOSTILE)
    text = build_comparison([runs["first"], run], tmp_path / "page.html").read_text()
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert json.loads(text.partition('id="data">')[2].partition("</script>")[0])["settings"]


def test_a_serving_cost_keeps_its_own_paired_ratio(runs: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["first"], run)
    write_json(run / "serving_cost.json", cost())
    files = [load_run(path, tables=False) for path in (run, runs["again"])]
    data = make_comparison(files, lambda index: "")["data"]["paired"]
    (key,) = [key for key in data if "ttft" in key]
    assert key == "A.offline|A.requant|64 in, 16 out, 4 at once, 16 prompts|ttft_mean_ms"
    assert data[key] == "× 1.004 [0.987, 1.021], paired by repeat, inconclusive"


def test_servers_of_others_on_two_hosts_are_not_compared(sample_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(sample_run, run)
    for arm, host in (("source", "x"), ("nvfp4", "x"), ("mxfp4_direct", "y")):
        edit(run / "server" / f"{arm}.json", engine="external", base_url=f"http://{host}:8000/v1", engine_version="")
    files = load_run(run)
    on_x, also_on_x, on_y, here = (
        machine_setting(files, arm) for arm in ("source", "nvfp4", "mxfp4_direct", "nvfp4_to_mxfp4")
    )
    assert comparable(on_x, also_on_x, same_run=True)
    assert not comparable(on_x, also_on_x, same_run=False)  # another day, perhaps another machine
    assert not comparable(on_x, on_y, same_run=True)
    assert not comparable(on_x, here, same_run=True)
    said = "Servers of others: source, nvfp4, mxfp4_direct. Their hardware, engine and version are not known here"
    assert said in build_report(run).read_text()
    assert said in (run / "summary.md").read_text()


# ---- in a browser ----------------------------------------------------------------------------------------------------


def beside(page: Any, table: str, entry: str, figure: str) -> str:
    """What the page says below a figure."""
    return str(page.inner_text(f'#{table} tr[data-entry="{entry}"] td[data-f^="{figure}"] .against'))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_baseline_is_chosen_in_the_page(browser: Any, runs: dict[str, Path], page: Path, theme: str) -> None:
    tasks = read_json(Comparison, runs["first"] / "comparison.json").tasks
    (paired,) = [t for t in tasks if (t.task, t.filter, t.candidate) == ("gsm8k_mini", "strict-match", "nvfp4")]
    values = {t.candidate: t.candidate_value for t in tasks if (t.task, t.filter) == (paired.task, paired.filter)}
    with opened(browser, page.as_uri(), theme=theme) as shown:
        said = shown.inner_text
        assert shown.input_value("#baseline") == "A.source"
        # paired, as this run recorded it
        text = beside(shown, "scores-0", "A.nvfp4", "score").replace("−", "-")
        assert text == f"{-paired.loss_pp:+.2f} pp [{-paired.loss_high_pp:.2f}, {-paired.loss_low_pp:.2f}], paired"
        # another run's arm: a difference without an interval; other shots: none
        again = 100 * (values["nvfp4"] - paired.baseline_value)
        assert beside(shown, "scores-0", "B.nvfp4", "score").replace("−", "-") == f"Δ {again:+.2f} pp"
        assert "not compared" in beside(shown, "scores-0", "C.nvfp4", "score")
        assert "other shots" in beside(shown, "scores-0", "C.nvfp4", "score")
        # speed: a ratio on the same machine, context elsewhere, never a ratio
        assert beside(shown, "cost", "A.nvfp4", "load") == "× 1.50"
        assert beside(shown, "cost", "B.source", "load") == "× 2.00"
        assert beside(shown, "cost", "C.source", "load") == "context: other processor, other torch"
        assert beside(shown, "cost", "C.source", "weight-bytes") == "× 1.00"
        assert not shown.locator('tr[data-entry^="C."] td[data-f="load"] .against', has_text="×").count()

        shown.select_option("#baseline", "A.nvfp4")
        assert beside(shown, "cost", "A.source", "load") == "× 0.67"
        assert beside(shown, "scores-0", "A.nvfp4", "score") == "baseline"
        # the run did not pair these two: a difference only
        other = 100 * (values["mxfp4_direct"] - values["nvfp4"])
        assert beside(shown, "scores-0", "A.mxfp4_direct", "score").replace("−", "-") == f"Δ {other:+.2f} pp"
        first, total = (
            float(shown.get_attribute(f'tr[data-entry="A.{arm}"] td[data-f="sqnr"]', "data-v"))
            for arm in ("nvfp4", "nvfp4_to_mxfp4")
        )
        assert beside(shown, "weights", "B.nvfp4_to_mxfp4", "sqnr").replace("−", "-") == f"Δ {total - first:+.2f} dB"
        assert "Baseline: A · nvfp4" in said("#said")
        assert shown.url.endswith("#baseline=A.nvfp4")
        assert shown.evaluate("document.querySelectorAll('tr.baseline').length") >= 4
    with opened(browser, f"{page.as_uri()}#baseline=B.source") as shown:
        assert shown.input_value("#baseline") == "B.source"


def test_other_sources_are_not_compared(browser: Any, runs: dict[str, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(runs["first"], run)
    edit(run / "server" / "source.json", fingerprint="0123456789abcdef")
    path = build_comparison([runs["first"], run], tmp_path / "page.html")
    with opened(browser, f"{path.as_uri()}#baseline=A.nvfp4") as shown:
        assert beside(shown, "weights", "B.nvfp4", "sqnr") == "not compared: other source's checkpoint"
        assert beside(shown, "products", "B.nvfp4", "noise-both") == "not compared: other source's checkpoint"
        assert beside(shown, "weights", "A.nvfp4_to_mxfp4", "sqnr").startswith("Δ")


def test_it_works_by_keyboard_on_a_small_screen_and_without_a_script(browser: Any, page: Path) -> None:
    with opened(browser, page.as_uri(), width=390) as shown:
        shown.focus("#baseline")
        shown.keyboard.press("ArrowDown")
        assert shown.input_value("#baseline") == "A.source_again"
        head = shown.locator("#table-cost thead th").nth(3)
        head.locator("button").press("Enter")
        loads = [float(cell.get_attribute("data-v")) for cell in shown.locator('td[data-f="load"]').all()]
        assert loads == sorted(loads)
    context = browser.new_context(java_script_enabled=False)
    shown = context.new_page()
    shown.goto(page.as_uri())
    assert not shown.is_visible(".controls")
    assert shown.is_visible("noscript p")
    assert "83.3 %" in shown.inner_text("#scores-0")
    context.close()
