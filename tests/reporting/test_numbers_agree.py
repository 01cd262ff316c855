"""report.html, summary.md and report.json show the same figures: every row of the JSON is looked up in both pages."""

from __future__ import annotations

import html
import html.parser
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from workbench.reporting.text import count, interval, number, of_unit, percent, probability, seconds, size, small

Row = list[str]


class Tables(html.parser.HTMLParser):
    """The rows of every table of a page, as the texts of their cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[Row] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self._cell = True
        elif tag == "small" and self._cell:
            self.rows[-1][-1] += " "

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def data(report_page: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(report_page.with_name("report.json").read_text())
    return content


@pytest.fixture(scope="module")
def pages(report_page: Path) -> dict[str, list[str]]:
    """Rows of both pages, each as one line with single spaces."""
    markdown = html.unescape(report_page.with_name("summary.md").read_text())
    rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in markdown.splitlines() if "|" in line]
    both = {"page": Tables(report_page.read_text()).rows, "Markdown": rows}
    return {name: [re.sub(r"\s+", " ", " | ".join(row)) for row in rows] for name, rows in both.items()}


def _expected(data: dict[str, Any]) -> Iterator[tuple[str, list[str], list[str]]]:
    """(what, texts that tell the row, figures that one such row of each page must hold)."""
    for d in data["detectable"]:
        yield "detectable", [d["task"], d["arm"]], [number(d["loss_upper95_pp"]), number(d["mde_pp"])]
    for c in data["verdict"]["checks"]:
        yield (
            "check",
            [c["name"], c["arm"], c["status"], c["reason"]],
            [of_unit(c[end], c["unit"]) for end in ("value", "limit")],
        )
    for a in data["arms"]:
        s = a["server"]
        figures = [*map(number, a["bits"]), size(s["weight_bytes"]), seconds(s["ready_s"]), size(s["peak_rss_bytes"])]
        figures += [percent(score["value"]) for score in a["scores"]]
        figures += [f"{number(r['percent'], 1)}" for r in a["recovery"] if r["filter"] != "flexible-extract"]
        yield "arm", [a["arm"], s["weight_format"], s["backend"]], figures
    for s in data["scores"]:
        yield "score", [s["task"], s["filter"], s["arm"]], [
            percent(s["value"]), interval(s["low"], s["high"], 1, 100), str(s["n"]),
        ]  # fmt: skip
    for c in data["comparisons"]:
        yield "comparison", [c["task"], c["filter"], c["candidate"]], [
            number(c["loss_pp"], 2, signed=True), interval(c["loss_low_pp"], c["loss_high_pp"]),
            number(c["loss_upper95_pp"]), number(c["recovery_percent"], 1), number(c["mde_pp"]),
            interval(c["recovery_low_percent"], c["recovery_high_percent"], 1), probability(c["p_loss"]),
            str(c["lost"]), str(c["gained"]),
        ]  # fmt: skip
    for p in data["artefacts"]:
        drift = [number(p["drift"]["ratio"], 3), str(p["drift"]["identical"])] if p["drift"] else []
        yield "artefacts", [p["task"], p["arm"]], [
            percent(p["accuracy_all"]), percent(p["accuracy_finished"]), count(p["truncated"]), *drift,
        ]  # fmt: skip
    for d in data["divergences"]:
        bounds = [small(d[k][end]) for k in ("mean", "median", "p99", "p999") for end in ("lower", "upper")]
        yield "divergence", [d["arm"], d["reference"]], [*bounds, percent(d["same_top1"], 2), str(d["positions"])]
    for w in data["weights"]:
        for label, key in (("SQNR, first, dB", "sqnr_first_db"), ("SQNR, after both, dB", "sqnr_total_db"),
                           ("SQNR, direct, dB", "sqnr_direct_db"), ("lost against first, dB", "loss_to_first_db"),
                           ("lost against direct, dB", "loss_to_direct_db")):  # fmt: skip
            spread = w[key]
            yield "weights", [label], [
                number(spread["pooled"]), interval(spread["pooled_low"], spread["pooled_high"]),
                number(spread["mean"]), f"{number(spread['minimum'])} to {number(spread['maximum'])}",
            ]  # fmt: skip
        for r in w["pooled"]["projections"]:
            tells = [r["projection"], "shared"] if r["shared_expert"] else [r["projection"]]
            keys = ("sqnr_first_db", "sqnr_total_db", "sqnr_direct_db")
            yield "projection", tells, [*(number(r[k]) for k in keys), number(r["corr_e1_e2"], 3), str(r["matrices"])]
    for g in data["products"]:
        yield "product", [g["arm"]], [
            number(g["sqnr_db"]["mean"]), number(g["sqnr_db"]["pooled"]), number(g["weight_sqnr_db"]["mean"]),
        ]  # fmt: skip
    for c in data["claims"]:
        digits = 2 if c["unit"] else 3
        yield "claim", [c["claim"], c["holds"]], [number(c["published"], digits), number(c["measured"], digits)]


def test_every_row_of_the_json_stands_in_both_pages(data: dict[str, Any], pages: dict[str, list[str]]) -> None:
    looked_up: dict[str, int] = {}
    for what, tells, figures in _expected(data):
        looked_up[what] = looked_up.get(what, 0) + 1
        for name, rows in pages.items():
            told = [row for row in rows if all(text in row for text in tells)]
            assert told, (name, what, tells)
            missing = min(([f for f in figures if f not in row] for row in told), key=len)
            assert not missing, (name, what, tells, missing, told[:3])
    assert set(looked_up) == {
        "detectable", "check", "arm", "score", "comparison", "artefacts", "divergence", "weights", "projection",
        "product", "claim",
    }  # fmt: skip
    assert sum(looked_up.values()) > 60


def test_the_json_holds_the_records_own_figures(data: dict[str, Any], sample_run: Path) -> None:
    comparison = json.loads((sample_run / "comparison.json").read_text())
    kept = {(c["task"], c["filter"], c["candidate"]): c for c in data["comparisons"]}
    for task in comparison["tasks"]:
        task.pop("flips")
        assert kept[task["task"], task["filter"], task["candidate"]] == task
    analysis = json.loads((sample_run / "analysis.json").read_text())
    assert data["products"] == analysis["gemm"]
    assert data["claims"] == analysis["claims"]
    assert data["weights"][0]["corr_e1_e2"] == analysis["pairs"][0]["corr_e1_e2"]
    assert data["verdict"] == {
        k: v for k, v in json.loads((sample_run / "verdict.json").read_text()).items() if k != "schema_version"
    }
    pooled = pd.read_parquet(sample_run / "pooled.parquet")
    model = pooled[pooled["level"] == "model"].iloc[0]
    assert data["weights"][0]["pooled"]["model"]["sqnr_total_db"] == model["sqnr_total_db"]


def test_every_flip_is_beside_the_page_with_whole_answers(sample_run: Path, report_page: Path) -> None:
    comparison = json.loads((sample_run / "comparison.json").read_text())
    flips = [
        f | {"baseline": t["baseline"], "candidate": t["candidate"]} for t in comparison["tasks"] for f in t["flips"]
    ]
    lines = [json.loads(line) for line in report_page.with_name("flips.jsonl").read_text().splitlines()]
    assert lines == flips
    assert len(lines) > 50
    assert report_page.read_text().count('id="flip-') == 50
