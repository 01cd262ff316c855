"""The page in a real browser: three widths, both themes, sorting, filtering, hovering, keys, paper, no script."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from .conftest import Watched

Open = Callable[..., Watched]
# Every visible text against what lies behind it, after opening what is folded: WCAG 2 AA.
CONTRAST = """() => {
  document.querySelectorAll("details").forEach((d) => (d.open = true));
  const parse = (color) => {
    const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const failed = [];
  let seen = 0;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const text = walker.currentNode, element = text.parentElement;
    if (!text.data.trim() || element.closest("script, style, title, option, .skip")) continue;
    if (!element.getClientRects().length) continue;
    const style = getComputedStyle(element);
    let opacity = 1;
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      opacity *= Number(getComputedStyle(at).opacity);
      layers.push(parse(getComputedStyle(at).backgroundColor));
    }
    if (opacity === 0) continue;
    const behind = layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
    const ink = parse(element.closest("svg") ? style.fill : style.color);
    const front = over([...ink.slice(0, 3), ink[3] * opacity], behind);
    const [a, b] = [light(front), light(behind)].sort((x, y) => y - x);
    const size = parseFloat(style.fontSize);
    const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    seen += 1;
    if ((a + 0.05) / (b + 0.05) < (large ? 3 : 4.5))
      failed.push(`${element.tagName} ${text.data.trim().slice(0, 30)} ${(a + 0.05) / (b + 0.05)}`);
  }
  return [seen, [...new Set(failed)]];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800, 390])
def test_it_is_drawn_without_an_error_or_a_request(
    open_page: Open, report_page: Path, width: int, scheme: str, tmp_path: Path
) -> None:
    watched = open_page(report_page, width=width, scheme=scheme)
    assert watched.errors == []
    assert watched.requests[0] == report_page.as_uri()
    assert all(url.startswith("data:image/png") for url in watched.requests[1:])
    shown = watched.page.evaluate(
        "() => [document.documentElement.scrollWidth, innerWidth, getComputedStyle(document.body).backgroundColor]"
    )
    assert shown[0] <= shown[1] == width
    assert (sum(map(int, re.findall(r"\d+", shown[2])[:3])) < 200) == (scheme == "dark")
    watched.page.screenshot(path=tmp_path / "page.png")
    import matplotlib.image
    import numpy as np

    image = matplotlib.image.imread(tmp_path / "page.png")
    assert image.shape[:2] == (900, width)
    assert len(np.unique(image[..., :3].reshape(-1, 3), axis=0)) > 50  # text and colours were drawn


def test_it_is_redrawn_at_another_width_without_an_error(open_page: Open, report_page: Path) -> None:
    watched = open_page(report_page, width=1280)
    for width in (390, 1280, 800):
        watched.page.set_viewport_size({"width": width, "height": 900})
        watched.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        boxes = watched.page.locator(".explorer .maps canvas").evaluate_all(
            "all => all.map(c => c.getBoundingClientRect().width)"
        )
        assert boxes
        assert max(boxes) <= width
    assert watched.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out(open_page: Open, report_page: Path, scheme: str) -> None:
    seen, failed = open_page(report_page, scheme=scheme).page.evaluate(CONTRAST)
    assert seen > 1000
    assert failed == []


def test_tables_sort_by_figures_and_filter(open_page: Open, report_page: Path) -> None:
    page = open_page(report_page).page
    table = page.locator("#paired ~ .scroll table").first
    header = table.locator("thead th", has_text="Loss, pp")
    column = "els => els.map(e => page.figure(e.cells[4].firstChild.textContent))"
    assert header.get_attribute("aria-sort") == "none"
    header.locator("button").click()
    losses = table.locator("tbody tr").evaluate_all(column)
    assert losses == sorted(losses)
    assert losses[0] < losses[-1]
    assert header.get_attribute("aria-sort") == "ascending"
    header.locator("button").press("Enter")
    assert table.locator("tbody tr").evaluate_all(column) == losses[::-1]
    assert header.get_attribute("aria-sort") == "descending"
    box = page.locator(".filter input").filter(visible=True).first
    rows = box.locator("xpath=ancestor::div[1]/following-sibling::div[1]//tbody/tr")
    before = rows.count()
    box.fill("mxfp4_direct")
    visible = [row for row in rows.all() if row.is_visible()]
    assert 0 < len(visible) < before
    assert all("mxfp4_direct" in row.inner_text() for row in visible)


def test_figures_are_read_as_they_are_printed(open_page: Open, report_page: Path) -> None:
    page = open_page(report_page).page
    printed = {"−1.50": -1.5, "22.1 MiB": 22.1 * 2**20, "4 min 10 s": 250, "2 h 5 min": 7500, "<0.001": 0.001,
               "84.0 %": 84, "1.9e-04": 1.9e-4, "5.3 s": 5.3, "1,024": 1024}  # fmt: skip
    for text, value in printed.items():
        assert page.evaluate("text => page.figure(text)", text) == pytest.approx(value), text
    assert page.evaluate("Number.isNaN(page.figure('–')) && page.figure('−∞ dB') === -Infinity")


@pytest.fixture
def rows(sample_run: Path) -> pd.DataFrame:
    return pd.read_parquet(sample_run / "tensors.parquet").set_index("name")


def _names(page: Any) -> list[str]:
    cells = page.locator(".grid .row:not(.head)").evaluate_all(
        "rows => rows.sort((a, b) => a.ariaRowIndex - b.ariaRowIndex).map(r => r.firstChild.textContent)"
    )
    return list(cells)


def test_every_matrix_is_found_sorted_and_filtered(open_page: Open, report_page: Path, rows: pd.DataFrame) -> None:
    page = open_page(report_page).page
    grid = page.locator(".grid")
    assert grid.get_attribute("aria-rowcount") == str(len(rows) + 1)
    first = _names(page)
    assert first[0] == rows["sqnr_total_db"].idxmin()
    assert len(first) < 30  # of 45: only those in view are in the page
    shown = page.locator(".grid .row").nth(1).locator(".cell").all_inner_texts()
    worst = rows.loc[first[0]]
    assert shown[3] == f"{worst.sqnr_total_db:.2f}"
    assert shown[6] == f"{worst.corr_e1_e2:.3f}".replace("-", "−")
    header = page.locator(".grid .head .cell", has_text="corr(e1, e2)")
    header.click()
    header.click()
    assert header.get_attribute("aria-sort") == "descending"
    assert _names(page)[0] == rows["corr_e1_e2"].idxmax()
    page.locator(".tensors .search").fill("experts.4 layers.2")
    assert sorted(_names(page)) == sorted(n for n in rows.index if ".experts.4." in n and ".layers.2." in n)
    page.locator(".tensors .search").fill("")
    page.locator(".tensors .projection").select_option("down_proj")
    page.locator(".tensors .layer").fill("1-2")
    page.locator(".tensors .expert").fill("5")
    chosen = rows[(rows.projection == "down_proj") & (rows.layer > 0) & (rows.expert == 5)]
    assert sorted(_names(page)) == sorted(chosen.index)
    assert page.locator(".tensors .count").inner_text().startswith(f"{len(chosen)} of 45 matrices")


def test_the_table_is_worked_with_keys(open_page: Open, report_page: Path, rows: pd.DataFrame) -> None:
    page = open_page(report_page).page
    page.locator(".grid .head .cell").first.focus()
    order = rows["sqnr_total_db"].sort_values(kind="stable").index
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "Control+End"):
        page.keyboard.press(key)
        assert page.locator('.grid .cell[tabindex="0"]').count() == 1
        assert page.evaluate("document.activeElement === document.querySelector('.grid .cell[tabindex=\"0\"]')")
    active = page.evaluate("document.activeElement.parentElement.firstChild.textContent")
    assert rows.loc[active, "sqnr_total_db"] == pytest.approx(rows["sqnr_total_db"].max(), abs=0.01)
    page.keyboard.press("Control+Home")
    assert page.evaluate("document.activeElement.parentElement.firstChild.textContent") == order[0]
    page.keyboard.press("Enter")
    assert page.evaluate("decodeURIComponent(location.hash)") == f"#tensor-0:{order[0]}"


def test_an_anchor_leads_to_its_matrix_and_its_flip(open_page: Open, report_page: Path) -> None:
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    page = open_page(report_page, hash=f"#tensor-0:{name}").page
    assert page.locator(".grid .row.chosen .cell").first.inner_text() == name
    assert page.locator(".grid").is_visible()
    flip = re.search(r'id="(flip-[\w-]+)"', report_page.read_text())
    assert flip is not None
    page = open_page(report_page, hash=f"#{flip.group(1)}").page
    assert page.locator(f"#{flip.group(1)} .answers").is_visible()  # its folds are open


def test_the_csv_holds_what_is_shown(open_page: Open, report_page: Path, rows: pd.DataFrame) -> None:
    page = open_page(report_page).page
    page.evaluate("page.copy = (text) => (window.copied = text)")
    page.locator(".tensors .search").fill("shared_experts")
    page.locator(".tensors .copy").click()
    lines = page.evaluate("window.copied").splitlines()
    assert lines[0].startswith("name,layer,expert,sqnr_total_db,")
    assert len(lines) == 1 + rows["shared_expert"].sum()
    for line in lines[1:]:
        cells = line.split(",")
        assert float(cells[3]) == pytest.approx(rows.loc[cells[0], "sqnr_total_db"], abs=0.005001)


def test_a_heat_map_tells_its_tensors(open_page: Open, report_page: Path, rows: pd.DataFrame) -> None:
    page = open_page(report_page).page
    canvas = page.locator(".map", has=page.locator("h5", has_text="gate_proj")).first.locator("canvas")
    canvas.scroll_into_view_if_needed()
    canvas.hover(position={"x": 30 + 22 * 2.5, "y": 9})  # layer 1, expert 2
    name = "model.layers.1.mlp.experts.2.gate_proj.weight"
    tip = page.locator("#tip")
    assert tip.inner_text() == f"{name}\nafter both {rows.loc[name, 'sqnr_total_db']:.2f} dB"
    readout = page.locator(".readout")
    assert f"first {rows.loc[name, 'sqnr_first_db']:.2f} dB" in readout.inner_text()
    page.mouse.move(5, 5)
    assert tip.is_hidden()
    page.locator(".explorer .metric").select_option("corr_e1_e2")
    ends = [page.locator(f".colorbar .{end}").inner_text() for end in ("low", "high")]
    assert ends[0].lstrip("≤ ") == "−" + ends[1].lstrip("≥ ")  # two colours around zero
    canvas.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert readout.locator("b").inner_text() == "model.layers.2.mlp.experts.1.gate_proj.weight"
    page.keyboard.press("Enter")
    assert page.locator(".grid .row.chosen .cell").first.inner_text() == "model.layers.2.mlp.experts.1.gate_proj.weight"


def test_every_figure_of_the_selector_is_drawn(open_page: Open, report_page: Path) -> None:
    page = open_page(report_page).page
    keys = page.locator(".explorer .metric option").evaluate_all("options => options.map(o => o.value)")
    assert {"sqnr_first_db", "sqnr_total_db", "sqnr_direct_db", "corr_e1_e2", "gain_total_excess", "scale_phase",
            "coherence_gain_db"} <= set(keys)  # fmt: skip
    pictures = set()
    for key in keys:
        page.locator(".explorer .metric").select_option(key)
        pictures.add(page.locator(".maps canvas").first.evaluate("canvas => canvas.toDataURL()"))
    assert len(pictures) == len(keys)


def test_the_theme_can_be_chosen(open_page: Open, report_page: Path) -> None:
    watched = open_page(report_page, scheme="light")
    page = watched.page
    paper = "getComputedStyle(document.body).backgroundColor"
    light, canvas = page.evaluate(paper), page.locator(".maps canvas").first
    drawn = canvas.evaluate("canvas => canvas.toDataURL()")
    button = page.locator("#theme")
    button.click()
    assert (button.inner_text(), page.evaluate(paper)) == ("Light", light)
    button.click()
    assert button.inner_text() == "Dark"
    assert page.evaluate(paper) != light
    assert page.locator(".maps canvas").first.evaluate("canvas => canvas.toDataURL()") != drawn
    assert watched.errors == []


def test_it_prints_whole_and_without_controls(open_page: Open, report_page: Path) -> None:
    watched = open_page(report_page, scheme="dark")
    page = watched.page
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    for hidden in ("nav", ".controls", ".filter", "#theme"):
        assert not page.locator(hidden).first.is_visible(), hidden
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert page.locator(".grid .row:not(.head)").count() == 40
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() > 0
    assert page.pdf().startswith(b"%PDF-")
    assert watched.errors == []


def test_what_matters_shows_without_a_script(open_page: Open, report_page: Path) -> None:
    watched = open_page(report_page, script=False)
    page = watched.page
    assert page.locator("#verdict .word").is_visible()
    assert page.locator("#weights .plain .panel svg").first.is_visible()
    assert page.locator("#detectable ~ figure svg").first.is_visible()
    for control in ("#theme", ".explorer", ".tensors"):
        assert not page.locator(control).first.is_visible(), control
    assert "needs the page's script" in page.locator("main").inner_text()


def test_it_can_be_used_by_ear_and_by_keys(open_page: Open, report_page: Path) -> None:
    page = open_page(report_page).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("input, select, button, canvas[tabindex], [role=region], [role=grid]")]
        .filter((e) => !(e.labels?.length || e.ariaLabel || e.textContent.trim())).map((e) => e.outerHTML)"""
    )
    assert unnamed == []
    levels = page.locator("main :is(h1, h2, h3, h4, h5)").evaluate_all("all => all.map(h => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert page.locator("thead th:not([scope=col])").count() == 0
    assert page.locator("main [role=region]:not([tabindex='0'])").count() == 0
