"""The list of all runs: complete also where runs are damaged, with trends that join what may be joined."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from workbench import run
from workbench.errors import ConfigError
from workbench.reporting.index import build_index, draw_sparkline, find_runs, make_index
from workbench.reporting.load import load_run

from .test_report import Page
from .variants import edit, make_variants, opened

HOSTILE = "</script><img src=x onerror=alert(1)>\u202egnp"


@pytest.fixture(scope="module")
def runs(sample_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = make_variants(sample_run, tmp_path_factory.mktemp("index") / "reports")
    (found["first"] / "report.html").write_text("<!DOCTYPE html><title>the report</title>")
    return found


@pytest.fixture(scope="module")
def root(runs: dict[str, Path]) -> Path:
    return runs["first"].parent.parent


@pytest.fixture(scope="module")
def listing(root: Path) -> str:
    return build_index(root).read_text()


def rows(text: str) -> list[str]:
    return re.findall(r"<tr data-run>.*?</tr>", text, flags=re.DOTALL)


def test_all_runs_are_listed_newest_first_with_their_state(root: Path, listing: str) -> None:
    assert Page(listing).stack == []
    listed = [re.search(r"kimi_requant/(\w+)", row).group(1) for row in rows(listing)]  # type: ignore[union-attr]
    assert listed == ["unfinished", "damaged", "other", "again", "first"]
    by_name = dict(zip(listed, rows(listing), strict=True))
    assert ">damaged</span>" in by_name["damaged"]
    assert "verdict.json: " in by_name["damaged"]
    assert ">unfinished</span>" in by_name["unfinished"]
    assert "gate not run; lint, analyze, evaluate done" in by_name["unfinished"]
    for name in ("first", "again", "other"):
        assert "unfinished" not in by_name[name]
        assert ">damaged<" not in by_name[name]
        assert "2026-10-0" in by_name[name]
        assert "5 min 24 s" in by_name[name]
    assert "5 runs, 1 unfinished, 1 damaged" in listing


def test_links_lead_to_the_reports_that_are_there(root: Path, listing: str) -> None:
    (link,) = [attrs["href"] for tag, attrs in Page(listing).tags if tag == "a" and attrs.get("href", "#")[0] != "#"]
    assert link == "kimi_requant/first/report.html"
    assert (root / link).is_file()
    assert listing.count("no report.html") == 4


def test_key_figures_are_the_records(runs: dict[str, Path], listing: str) -> None:
    (row,) = [row for row in rows(listing) if "kimi_requant/first" in row]
    tasks = json.loads((runs["first"] / "comparison.json").read_text())["tasks"]
    pair = json.loads((runs["first"] / "analysis.json").read_text())["pairs"][0]
    gated = [t for t in tasks if t["primary"] and t["candidate"] in ("nvfp4", "nvfp4_to_mxfp4")]
    assert len(gated) == 4
    for task in gated:
        assert f"recovery, {task['task']} {task['recovery_percent']:.1f} %" in row
    assert f"SQNR, even {pair['sqnr_total_db']['pooled']:.2f} dB" in row
    assert "mxfp4_direct" not in row  # reported, not gated


def test_a_trend_joins_only_what_was_measured_alike(runs: dict[str, Path], root: Path) -> None:
    files = [load_run(runs[name], tables=False) for name in ("first", "again", "other")]
    (group,) = make_index(files, root, lambda run: "")["experiments"]
    trends = {(t.arm, t.figure): t for t in group["trends"]}
    load = trends["source", "load time"]
    assert [p.value for p in load.points] == [2.0, 4.0, 0.9]
    assert load.breaks == [2]  # another machine
    assert trends["nvfp4", "score, gsm8k_mini"].breaks == [2]  # other shots
    assert trends["source", "score, gsm8k_mini"].breaks == []
    assert trends["nvfp4_to_mxfp4", "SQNR, even"].breaks == []
    assert all(len(t.points) == 3 for t in trends.values())


def test_settings_that_were_not_recorded_join_nothing(runs: dict[str, Path], root: Path, tmp_path: Path) -> None:
    bare = [tmp_path / name for name in ("a", "b")]
    for folder in bare:
        shutil.copytree(runs["first"], folder)
        (folder / "manifest.json").unlink()
    files = [load_run(folder, tables=False) for folder in bare]
    (group,) = make_index(files, tmp_path, lambda run: "")["experiments"]
    (load,) = [t for t in group["trends"] if (t.arm, t.figure) == ("source", "load time")]
    assert load.breaks == [1]


def test_a_sparkline_rises_with_its_values_and_ends_at_breaks() -> None:
    svg = str(draw_sparkline([1.0, 2.0, 4.0, 3.0], [2], "<arm>"))
    points = [[tuple(map(float, p.split(","))) for p in line.split()] for line in re.findall(r'points="([^"]+)"', svg)]
    assert [len(line) for line in points] == [2, 2]
    heights = [y for line in points for _, y in line]
    assert sorted(heights, reverse=True) == [heights[0], heights[1], heights[3], heights[2]]  # y grows downwards
    assert svg.count("<circle") == 4
    assert "<arm>" not in svg
    assert "&lt;arm&gt;: 4 runs" in svg
    assert "<polyline" not in str(draw_sparkline([5.0], [], "one"))


def test_only_run_folders_are_found_and_never_within_one(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "a" / "deep").mkdir(parents=True)
    for place in ("run", "run/nested", ".hidden", "1/2/3/4/5/6"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "manifest.json").write_text("{}")
    (tmp_path / "eval").mkdir()  # of a root that is no run itself
    (tmp_path / "link").symlink_to(runs["first"])
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    assert find_runs(tmp_path) == [tmp_path / "run"]
    assert find_runs(tmp_path / "run") == [tmp_path / "run"]


def test_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    assert "No run lies in this folder." in build_index(tmp_path).read_text()
    with pytest.raises(ConfigError, match="no folder"):
        build_index(tmp_path / "none")


def test_a_run_writes_the_list_into_its_output_root(tmp_path: Path) -> None:
    overrides = ["experiment=kimi_requant", "stages=[report]", f"paths.out={tmp_path}"]
    for _ in range(2):
        assert run.main(overrides) == 3  # nothing was judged
    text = (tmp_path / "index.html").read_text()
    assert len(rows(text)) == 2
    assert all("mini-kimi" in row and "Not judged" in row and "report.html" in row for row in rows(text))


def test_names_and_contents_of_anyone_are_text(runs: dict[str, Path], tmp_path: Path) -> None:
    hostile = tmp_path / "reports" / "javascript:alert(1)" / "r"
    shutil.copytree(runs["first"], hostile)
    edit(hostile / "manifest.json", experiment=HOSTILE, started=HOSTILE)
    edit(hostile / "verdict.json", headline=HOSTILE)
    (hostile / "report.html").write_text("x")
    misfit = tmp_path / "reports" / "misfit"
    shutil.copytree(runs["first"], misfit)
    (misfit / "analysis.json").write_text('{"schema_version": 1, "pairs": [1]}')
    text = build_index(tmp_path / "reports").read_text()
    assert "<img" not in text
    assert "\u202e" not in text
    assert 'href="javascript%3Aalert%281%29/r/report.html"' in text
    assert "analysis.json: its contents do not fit" in text
    assert text.count("<script") == 1


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_browser_filters_and_sorts_it(browser: Any, root: Path, listing: str, theme: str) -> None:
    with opened(browser, (root / "index.html").as_uri(), theme=theme) as page:
        shown = page.locator("tr[data-run]:visible")
        page.fill("#search", "kimi again")
        assert shown.count() == 1
        assert page.inner_text("#shown") == "1 of 5 runs"
        page.fill("#search", "")
        head = page.locator("#table-runs thead th").nth(0)
        head.locator("button").focus()
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == "ascending"
        names = [
            text.split("\n")[0].removeprefix("kimi_requant/")
            for text in page.locator("tr[data-run] th").all_inner_texts()
        ]
        assert names == ["again", "damaged", "first", "other", "unfinished"]
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == "descending"
        page.click("#theme")
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        page.click("#theme")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)"


def test_a_small_screen_shows_it_too(browser: Any, root: Path, listing: str) -> None:
    with opened(browser, (root / "index.html").as_uri(), width=390) as page:
        assert page.locator("tr[data-run]").count() == 5
