"""Make reports/samples/ anew from a finished run: its page, its summary, and a picture of the page's top.

    python -m tests.reporting.refresh_samples reports/kimi_requant/2026-10-01_120000

The run is copied first; paths of the machine that made it are cut down to what lies below the repository or beside the
run, and its kernel's build to the system's name. Nothing else of its records changes but the digests by which the
verdict knows them. Refuses a run whose verdict is out of date, and to write anything that still names such a path or
this host.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import re
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from workbench.records import Comparison, Verdict, read_json, write_json
from workbench.records.judged import changed_since
from workbench.reporting import build_report

ROOT = Path(__file__).parent.parent.parent
SAMPLES = ROOT / "reports" / "samples"
LOCAL = re.compile(r"(?<![\w.:/<])/(?:tmp|work|root|home|Users|mnt|data|opt|scratch)/[^\s\"'<>|]*")
WIDTH, HEIGHT = 1280, 1500


def _know_again(run: Path, copy: Path) -> None:
    """Put the digests of the copy's files in place of the run's. Raises ValueError where the verdict is out of date."""
    verdict = read_json(Verdict, run / "verdict.json")
    if changed := changed_since(run, verdict):
        raise ValueError(f"the run's verdict is out of date: {', '.join(changed[:3])} changed since")

    def again(names: dict[str, str]) -> dict[str, str]:
        return {name: hashlib.sha256((copy / name).read_bytes()).hexdigest() for name in names}

    file = copy / "comparison.json"
    comparison = read_json(Comparison, file)
    write_json(file, dataclasses.replace(comparison, sources=again(comparison.sources)))
    write_json(copy / "verdict.json", dataclasses.replace(verdict, judged=again(verdict.judged)))


def refresh(run: Path, out: Path = SAMPLES) -> None:
    """Raises ValueError naming what is left of local paths; then `out` is as it was."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / run.resolve().name
        skipped = shutil.ignore_patterns("*.log", "*.safetensors", "figures", "report.*", "summary.md")
        shutil.copytree(run, copy, ignore=skipped)
        beside = run.resolve().parents[2]  # what the run's own paths are relative to
        for path in copy.rglob("*"):
            if path.suffix in (".json", ".jsonl", ".yaml", ".xml", ".md"):
                text = path.read_text(encoding="utf-8")
                for folder in sorted({str(beside), str(ROOT), f"{sys.prefix}/bin"}, key=len, reverse=True):
                    text = text.replace(f"{folder}/", "")
                text = re.sub(r"\bLinux-[\w.-]+?-(x86_64|aarch64)\b", r"Linux-\1", text)
                path.write_text(text, encoding="utf-8")
        _know_again(run, copy)
        page = build_report(copy, strict=True)
        made = {name: (copy / name).read_text(encoding="utf-8") for name in ("report.html", "summary.md")}
        for name, text in made.items():
            left = sorted({*LOCAL.findall(text), *re.findall(rf"\b{re.escape(socket.gethostname())}\b", text)})
            if left:
                raise ValueError(f"{name} names what is of this machine: {left[:5]}")
        out.mkdir(parents=True, exist_ok=True)
        for name, text in made.items():
            (out / name).write_text(text, encoding="utf-8")
        (out / "report.png").write_bytes(picture(page))


def picture(page: Path) -> bytes:
    """The page's top in a browser, as a PNG of few colours."""
    from PIL import Image
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        shown = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        shown.goto(page.as_uri())
        shown.wait_for_selector("html[data-ready]")
        raw = shown.screenshot()
        browser.close()
    small = io.BytesIO()
    Image.open(io.BytesIO(raw)).convert("RGB").quantize(128).save(small, "png", optimize=True)
    return small.getvalue()


if __name__ == "__main__":
    refresh(Path(sys.argv[1]))
