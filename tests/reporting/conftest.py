"""Sample run folders and one Chromium for the tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from workbench.reporting import build_report

from .sample_run import make_sample_run

# Errors that the browser logs without an exception, as of a resize observer that changes what it observes.
REPORT_ERRORS = "addEventListener('error', (event) => console.error(`window: ${event.message}`))"


@dataclass
class Watched:
    """A page in the browser, with what it asked for and what went wrong in it."""

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@pytest.fixture(scope="session")
def sample_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("reports") / "kimi_requant" / "2026-10-01_12-00-00"
    make_sample_run(run_dir)
    return run_dir


@pytest.fixture(scope="session")
def small_run(sample_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample run without its tables: quick to render. Tests copy it before they change anything."""
    run_dir = tmp_path_factory.mktemp("small") / "run"
    shutil.copytree(sample_run, run_dir, ignore=shutil.ignore_patterns("*.parquet", "report.*"))
    return run_dir


@pytest.fixture(scope="session")
def report_page(sample_run: Path) -> Path:
    """The sample run's report.html."""
    return build_report(sample_run)


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """The system's Chromium. Of this folder only: while it is open, no test of the thread can run an event loop."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("chromium is not installed")
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=arguments)
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Watched]]:
    """open_page(path, width=1280, scheme="light", script=True, hash=""): a new, watched page, its script done."""
    contexts = []

    def open_(
        path: Path, *, width: int = 1280, scheme: str = "light", script: bool = True, hash: str = "", wait: bool = True
    ) -> Watched:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=script
        )
        contexts.append(context)
        watched = Watched(context.new_page())
        watched.page.on("request", lambda request: watched.requests.append(request.url))
        watched.page.on("pageerror", lambda error: watched.errors.append(str(error)))
        watched.page.on("console", lambda message: watched.errors.append(f"{message.type}: {message.text}"))
        watched.page.on("dialog", lambda dialog: watched.errors.append(f"dialog: {dialog.message}"))
        watched.page.add_init_script(REPORT_ERRORS)
        watched.page.goto(path.as_uri() + hash)
        if script and wait:
            watched.page.wait_for_selector("html[data-ready]")
        return watched

    yield open_
    for context in contexts:
        context.close()
