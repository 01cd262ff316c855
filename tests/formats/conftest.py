"""Fixtures of the format tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def oracles() -> Path:
    """Exports written by the producers' own tools, where WORKBENCH_SHARED_DATA holds them."""
    root = Path(os.environ.get("WORKBENCH_SHARED_DATA", "/nonexistent"), "oracles")
    if not root.is_dir():
        pytest.skip("WORKBENCH_SHARED_DATA holds no oracles")
    return root
