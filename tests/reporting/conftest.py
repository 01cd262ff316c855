"""One sample run folder for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from .sample_run import make_sample_run


@pytest.fixture(scope="session")
def sample_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("reports") / "kimi_requant" / "2026-10-01_12-00-00"
    make_sample_run(run_dir)
    return run_dir
