"""Runs like the sample run but for what a test is about, and what every page must be like in a browser.

runs = make_variants(sample_run, tmp_path / "reports")
with opened(browser, url) as page: ...
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workbench.records import Comparison, read_json
from workbench.records.judged import evidence_digests

LATER = "2026-10-02T12:00:00+00:00"
CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const ground = (node) => {
    for (let n = node; n; n = n.parentElement) {
      const c = rgb(getComputedStyle(n).backgroundColor);
      if (c.length < 4 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest("svg, script, style, noscript, option")) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(ground(node))].sort((x, y) => y - x);
    const said = `${node.tagName} ${node.className}: ${node.textContent.trim().slice(0, 40)}`;
    if ((a + .05) / (b + .05) < 4.5) bad.push(said);
  }
  return bad;
}"""


def make_variants(sample_run: Path, root: Path) -> dict[str, Path]:
    """first; again: the same a day later; other: on another machine, one arm asked with other shots, another seed;
    damaged; unfinished."""
    runs = {name: root / "kimi_requant" / name for name in ("first", "again", "other", "damaged", "unfinished")}
    for name, run in runs.items():
        shutil.copytree(sample_run, run, ignore=shutil.ignore_patterns("report.*", "flips.jsonl", "figures", "index.*"))
        edit(run / "manifest.json", started=f"2026-10-0{list(runs).index(name) + 1}T12:00:00+00:00")
    for arm in ("source", "nvfp4"):
        edit(runs["first"] / "server" / f"{arm}.json", load_s=2.0 if arm == "source" else 3.0)
        edit(runs["again"] / "server" / f"{arm}.json", load_s=4.0 if arm == "source" else 4.5)
    edit(runs["other"] / "manifest.json", cpu="another machine", packages={"torch": "1.0"})
    scores = runs["other"] / "eval" / "nvfp4" / "scores.json"
    rows = json.loads(scores.read_text())["scores"]
    edit(scores, scores=[{**row, "num_fewshot": 5} for row in rows])
    config = runs["other"] / "config.yaml"
    config.write_text(config.read_text() + "seed: 3\n")
    for name in ("first", "again", "other"):  # judged as they are now
        comparison = read_json(Comparison, runs[name] / "comparison.json")
        edit(runs[name] / "verdict.json", judged=evidence_digests(runs[name], comparison))
    (runs["damaged"] / "verdict.json").write_text("{")
    (runs["unfinished"] / "verdict.json").unlink()
    config = runs["unfinished"] / "config.yaml"
    config.write_text(config.read_text() + "stages: [prepare, evaluate, gate]\n")
    return runs


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@contextlib.contextmanager
def opened(browser: Any, url: str, width: int = 1280, theme: str = "light") -> Iterator[Any]:
    """A page in a real browser that logs no error, asks nothing of elsewhere, and reads well."""
    complaints: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.extend([] if request.url.startswith(url[:20]) else [request.url]))
    try:
        page.goto(url)
        yield page
        assert complaints == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # only tables scroll sideways
        assert page.evaluate(CONTRAST) == []
    finally:
        page.close()
