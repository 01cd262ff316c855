"""Wall clock of the report of 69,303 matrices in Chromium, from the call to open it to a page that answers.

    python tests/reporting/page_speed.py [--repeat 10]

Beside it the main thread's own work, which `test_large_run.py` bounds: the wall clock also measures the neighbours.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from playwright.sync_api import sync_playwright

from tests.reporting.large_run import MATRICES, make_large_run
from workbench.reporting import build_report

READY = """() => new Promise((done) => {
    const now = () => document.documentElement.dataset.ready && done(performance.now());
    new MutationObserver(now).observe(document.documentElement, {attributes: true});
    now();
})"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=10)
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("chromium is not installed")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    ready, tasks = [], []
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        make_large_run(Path(scratch) / "run")
        page_file = build_report(Path(scratch) / "run")
        for _ in range(arguments.repeat):
            browser = playwright.chromium.launch(executable_path=chromium, args=flags)
            page = browser.new_page()
            session = page.context.new_cdp_session(page)
            session.send("Performance.enable", {"timeDomain": "threadTicks"})
            page.goto(page_file.as_uri(), wait_until="commit")
            ready.append(page.evaluate(READY) / 1000)
            metrics = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
            tasks.append(metrics["TaskDuration"])
            version = browser.version
            browser.close()
        size = page_file.stat().st_size
    machine = f"Chromium {version}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(f"{MATRICES:,} matrices, {size / 1e6:.2f} MB, {machine}")
    for name, values in (("ready, wall clock", ready), ("main thread, processor", tasks)):
        print(f"{name}: median {statistics.median(values):.2f} s ({min(values):.2f} to {max(values):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
