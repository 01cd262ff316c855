"""A run's serving cost in both pages: starts with the source of each figure, latencies, ratios with their verdicts."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from workbench.records import CostRatio, Latency, ServingCost, ServingLoad, Sourced, StartCost, write_json
from workbench.reporting import build_report
from workbench.reporting.comparable import comparable, cost_setting
from workbench.reporting.load import load_run

KNOWN = Sourced(value=2.5, source="plugin's audit")
ABSENT = Sourced(source="no GPU, or nothing measured there")


def cost() -> ServingCost:
    start = StartCost(
        arm="requant", ready_s=KNOWN, load_s=KNOWN, read_s=KNOWN, convert_s=KNOWN, rest_s=KNOWN,
        peak_bytes=Sourced(value=3 * 2.0**30, source="sampled"), after_bytes=ABSENT,
        device_peak_bytes=ABSENT, device_after_bytes=ABSENT,
    )  # fmt: skip
    figures = {f"{n}_{k}_ms": 12.3 for n in ("ttft", "tpot", "itl", "e2el") for k in ("mean", "median", "p99")}
    ratio = CostRatio(
        arm="requant", load=0, figure="ttft_mean_ms", ratio=1.0041, low=0.9871, high=1.0213, equal_low=0.99,
        equal_high=1.01, margin=0.01, repeats=3, left_out=0, verdict="inconclusive", repeats_needed=17,
    )  # fmt: skip
    return ServingCost(
        baseline="offline", arms=("offline", "requant"), preset="small",
        loads=(ServingLoad(input_tokens=64, output_tokens=16, concurrency=4, prompts=16),), repeats=3, together=True,
        date="2026-01-02", machine="<b>some</b> processor", cores=2, system_load=(1.0, 2.0), engine_version="vllm 0",
        starts=(start,), runs=(),
        latencies=(Latency(arm="requant", load=0, repeats=3, completed=47, failed=1,
                           figures={**figures, "output_tokens_per_s": math.nan}),),
        ratios=(ratio,),
    )  # fmt: skip


def test_both_pages_show_the_serving_cost(tmp_path: Path) -> None:
    write_json(tmp_path / "serving_cost.json", cost())
    html = build_report(tmp_path).read_text()
    section = html[html.index('id="serving-cost"') :].partition("</section>")[0]
    for text in ("1.0041", "[0.9871, 1.0213]", "inconclusive", ">17<", "3.0 GiB", 'title="no GPU, or nothing measured'):
        assert text in section, text
    assert "&lt;b&gt;some" in section
    assert "2 cores, load average 1.0 to 2.0, vllm 0" in section
    summary = (tmp_path / "summary.md").read_text()
    assert "## Serving cost" in summary
    assert "2 cores, load average 1.0 to 2.0, vllm 0" in summary
    assert "| 64 in, 16 out, 4 at once, 16 prompts | requant | ttft_mean_ms | 1.0041 | [0.9871, 1.0213] |" in summary
    assert "| 12.3 | 12.3 | 12.3 | 12.3 | – | 1 |" in summary


def test_servers_of_others_are_named_and_no_ratio_is_made_across_hosts(tmp_path: Path) -> None:
    urls = {"offline": "http://x:1/v1", "requant": "http://y:1/v1"}
    write_json(tmp_path / "serving_cost.json", dataclasses.replace(cost(), ratios=(), urls=urls))
    section = build_report(tmp_path).read_text().partition('id="serving-cost"')[2].partition("</section>")[0]
    for text in (section, (tmp_path / "summary.md").read_text()):
        assert "Servers of others: offline, requant; their hardware, engine and version are not known here" in text
        assert (
            "No ratio of requant to offline: requant and offline are servers of others on two hosts, y and x." in text
        )
    files = load_run(tmp_path)
    x, y = (cost_setting(files, "load", arm) for arm in urls)
    assert not comparable(x, y, same_run=True)
    assert comparable(x, x, same_run=True)
    assert not comparable(x, x, same_run=False)


def test_a_run_without_it_has_no_such_section(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: x\n")
    assert 'id="serving-cost"' not in build_report(tmp_path).read_text()
    assert "Serving cost" not in (tmp_path / "summary.md").read_text()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "serving_cost.json").write_text("{}")
    html = build_report(tmp_path).read_text()
    assert "serving_cost.json" in html
    assert 'id="serving-cost"' not in html
