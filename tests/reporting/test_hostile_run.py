"""A run whose texts are hostile: tags, handlers, URLs, direction marks, megabytes. Nothing runs, nothing breaks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from workbench.reporting import build_report

from .conftest import Watched

MEAN = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<a href=\"javascript:document.title='owned'\">x</a>{{ 7*7 }}{% raw %}${1}<!-- --><svg onload=alert(1)>"
    "]]>\u202eabc\u2066\x00\x1b[31m&lt;b&gt; `|` \u2028 'q' $x_{2}$"
)


@pytest.fixture(scope="module")
def hostile_page(sample_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample run with MEAN in texts that a model, a checkpoint or a server could have written."""
    run_dir = tmp_path_factory.mktemp("hostile") / "run"
    shutil.copytree(sample_run, run_dir)
    comparison = json.loads((run_dir / "comparison.json").read_text())
    for task in comparison["tasks"]:
        for flip in task["flips"]:
            for key in ("question", "target"):
                flip[key] = MEAN
            flip["baseline_answer"], flip["candidate_answer"] = f"same {MEAN} yes", f"same {MEAN} no {MEAN}"
        if task["flips"]:
            task["flips"][0] |= {"baseline_answer": "<b>" * 350_000, "candidate_answer": MEAN * 3000}
    (run_dir / "comparison.json").write_text(json.dumps(comparison))
    manifest = json.loads((run_dir / "manifest.json").read_text())
    manifest |= {"experiment": MEAN, "command": ["python", MEAN], "checkpoints": {MEAN: {"fingerprint": MEAN}}}
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    verdict = json.loads((run_dir / "verdict.json").read_text())
    verdict["headline"] = verdict["policy_note"] = verdict["checks"][0]["reason"] = MEAN
    (run_dir / "verdict.json").write_text(json.dumps(verdict))
    lint = json.loads((run_dir / "lint" / "nvfp4.json").read_text())
    lint["findings"][0] |= {"tensor": MEAN, "message": MEAN * 2000, "check": MEAN}
    (run_dir / "lint" / "nvfp4.json").write_text(json.dumps(lint))
    for path in (run_dir / "server").glob("*.json"):
        server = json.loads(path.read_text()) | {"checkpoint": f"x/{MEAN}", "command": [MEAN], "engine_version": MEAN}
        path.write_text(json.dumps(server))
    tensors = pd.read_parquet(run_dir / "tensors.parquet")
    worst = tensors["sqnr_total_db"].idxmin()
    tensors.loc[worst, ["name", "projection"]] = [MEAN, MEAN]
    tensors.to_parquet(run_dir / "tensors.parquet")
    for arm in ("nvfp4", "mxfp4_direct"):  # arms and tasks name themselves too
        path = run_dir / "eval" / arm / "scores.json"
        scores = json.loads(path.read_text())
        scores["scores"][0] |= {"task": MEAN, "filter": MEAN}
        path.write_text(json.dumps(scores))
    return build_report(run_dir)


@pytest.mark.parametrize("script", [True, False])
def test_nothing_of_it_runs_or_loads(hostile_page: Path, open_page: Callable[..., Watched], script: bool) -> None:
    watched = open_page(hostile_page, script=script)
    page = watched.page
    assert watched.errors == []
    assert watched.requests[0] == hostile_page.as_uri()
    assert all(url.startswith("data:image/png") for url in watched.requests[1:])
    assert "owned" not in page.title() or "document.title=" in page.title()
    if not script:
        return
    found = page.evaluate(
        """() => [
          document.querySelectorAll("script").length, document.querySelectorAll("img, iframe, object, embed").length,
          [...document.querySelectorAll("a")].filter((a) => !a.getAttribute("href").startsWith("#")).length,
          [...document.querySelectorAll("*")].filter((e) => e.getAttributeNames().some((n) => /^on/.test(n))).length,
        ]"""
    )
    assert found == [2, 0, 0, 0]
    assert page.locator(".grid .row").nth(1).locator(".cell").first.inner_text().startswith("</script><script>")
    box = page.locator(".maps canvas").first
    box.focus()
    page.keyboard.press("ArrowRight")
    page.locator(".tensors .search").fill("</script>")
    assert page.locator(".tensors .count").inner_text().startswith("1 of 45")
    page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert watched.errors == []


def test_the_text_is_escaped_shown_and_bounded(hostile_page: Path) -> None:
    text = hostile_page.read_text()
    assert len(text.encode()) < 1_000_000
    assert text.count("<script") == 2
    assert "<img" not in text
    assert "onerror=&#34;" in text
    assert "{{ 7*7 }}" in text  # a template's signs are text too
    assert "\u202e" not in text
    assert "⟨U+202E⟩" in text
    assert "characters left out" in text
    summary = hostile_page.with_name("summary.md").read_text()
    assert "\u202e" not in summary
    code = [line for line in summary.splitlines() if "<script" in line or "<img" in line]
    assert code
    assert all(line.startswith("    python ") for line in code)  # the command that repeats the run, a block of code
    whole = json.loads(hostile_page.with_name("flips.jsonl").read_text().splitlines()[0])
    assert whole["baseline_answer"] == "<b>" * 350_000
