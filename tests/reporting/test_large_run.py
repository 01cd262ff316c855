"""The page of a model with a trillion parameters: 69,303 matrices in less than 2 MB, ready within a second of work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from workbench.reporting import build_report
from workbench.reporting.columns import unpack
from workbench.reporting.tensor_names import join_name

from .conftest import Watched
from .large_run import BROKEN, MATRICES, make_large_run

pytestmark = pytest.mark.slow  # one run, made and rendered once


@pytest.fixture(scope="module")
def large_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("large") / "run"
    make_large_run(run_dir)
    return build_report(run_dir)


def test_every_matrix_is_in_the_page_within_its_limit(large_page: Path) -> None:
    text = large_page.read_text()
    assert MATRICES == 69_303
    assert len(text.encode()) < 2_000_000
    (table,) = json.loads(text.partition('id="tensor-data">')[2].partition("</script>")[0])
    columns = unpack(table)
    frame = pd.read_parquet(large_page.parent / "tensors.parquet")
    rebuilt = [
        join_name(table["patterns"][int(p)], int(layer), int(expert))
        for p, layer, expert in zip(columns["pattern"], columns["layer"], columns["expert"], strict=True)
    ]
    assert rebuilt == frame["name"].tolist()
    assert len(table["patterns"]) == 9
    assert len(table["metrics"]) == 11  # none had to be left out
    for metric in table["metrics"]:
        if metric["key"] not in frame.columns:
            continue
        exact, kept = frame[metric["key"]].to_numpy(np.float64), columns[metric["key"]]
        finite = np.isfinite(exact)
        assert np.array_equal(exact[~finite], kept[~finite], equal_nan=True)
        assert np.abs(exact[finite] - kept[finite]).max() <= 0.5000001 * metric["step"], metric
    for step in ("0.01 dB", "0.001", "0.0001"):
        assert re.search(rf"Kept at .*{re.escape(step)} \(", text), step


def test_it_is_ready_within_a_second_of_work(large_page: Path, open_page: Callable[..., Watched]) -> None:
    """Processor time of the page's main thread, from an empty page to sorted table and drawn maps: the wall clock of a
    busy machine would measure its neighbours."""
    watched = open_page(large_page.parent / "report.json", wait=False)
    page = watched.page
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(large_page.as_uri())
    page.wait_for_selector("html[data-ready]")
    measured = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
    assert 0 < measured["ScriptDuration"] < 0.5
    assert measured["TaskDuration"] < 1.5
    assert watched.errors == []


def test_the_worst_matrix_is_first_and_the_last_is_reached(large_page: Path, open_page: Callable[..., Watched]) -> None:
    page = open_page(large_page).page
    grid = page.locator(".grid")
    assert grid.get_attribute("aria-rowcount") == str(MATRICES + 1)
    names = grid.locator(".row:not(.head) .cell:first-child").all_inner_texts()
    assert len(names) < 40
    assert names[1] == BROKEN  # after the one at minus infinity
    page.locator(".grid .head .cell").first.focus()
    for key in ("Control+End", "End"):
        page.keyboard.press(key)
    assert page.evaluate("document.activeElement.parentElement.ariaRowIndex") == str(MATRICES + 1)
    page.locator(".tensors .search").fill("layers.60. experts.383.")
    assert page.locator(".tensors .count").inner_text().startswith("3 of 69,303 matrices")
    assert page.locator(".map canvas").count() == 4
    width = page.locator(".map canvas").first.evaluate("canvas => canvas.clientWidth")
    assert 700 < width <= 1100
