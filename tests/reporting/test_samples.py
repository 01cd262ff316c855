"""The committed sample: what the README shows, small, and of no one's machine."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from .refresh_samples import LOCAL, ROOT, SAMPLES, refresh
from .test_report import Page


def test_the_readme_shows_files_that_are_there() -> None:
    shown = re.findall(r"\]\((reports/samples/[^)]+)\)", (ROOT / "README.md").read_text())
    assert "reports/samples/report.png" in shown
    assert all((ROOT / path).is_file() for path in shown)


def test_the_sample_is_small_and_whole() -> None:
    assert (SAMPLES / "report.png").stat().st_size < 400_000
    with Image.open(SAMPLES / "report.png") as image:
        assert image.width == 1280
    page = (SAMPLES / "report.html").read_text()
    assert len(page.encode()) < 1_000_000
    assert Page(page).stack == []
    assert "Unreadable file" not in page
    assert "Out of date" not in page


@pytest.mark.parametrize("name", ["report.html", "summary.md"])
def test_the_sample_names_no_path_of_a_machine(name: str) -> None:
    text = (SAMPLES / name).read_text()
    assert LOCAL.findall(text) == []
    assert "/root/" not in text


def test_page_and_summary_are_of_the_same_run() -> None:
    page, summary = ((SAMPLES / name).read_text() for name in ("report.html", "summary.md"))
    headline = re.search(r"^\*\*(.+)\*\* \(exit code \d", summary, flags=re.MULTILINE)
    assert headline is not None
    assert html.escape(headline.group(1)) in page
    paired = summary.partition("\nPaired with ")[2].partition("\n\n## ")[0]
    losses = re.findall(r"\| ([+−]?\d+\.\d\d \[[^\]]+\]) \|", paired)
    assert len(losses) >= 12  # four arms, three filters
    shown = re.sub(r"<small>|</small>", " ", page)
    assert all(re.search(re.escape(loss).replace(r"\ ", r"\s+"), shown) for loss in losses)


def test_local_paths_are_refused(sample_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "a" / "b" / "run"
    shutil.copytree(sample_run, run)
    manifest = run / "manifest.json"
    manifest.write_text(manifest.read_text().replace("a sample machine", "/home/someone/machine"))
    with pytest.raises(ValueError, match="/home/someone/machine"):
        refresh(run, tmp_path / "samples")
    assert not (tmp_path / "samples").exists()
