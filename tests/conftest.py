"""How the suite is spread over two processes (`pytest -n 2 --dist loadscope --no-loadscope-reorder`, see Makefile).

Tests of one file share fixtures and stay together; so do all of tests/serving, which share their engines. What takes
longest starts first, an engine beside what needs none, so that neither process ends alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads sleep: the other process has work

_ROOT = Path(__file__).parent
# By measured minutes, most first; everything else follows in its own order.
_FIRST = ("test_demo.py", "kernels", "serving", "test_studies.py", "analysis", "test_bad_input.py", "reporting")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        place = item.path.relative_to(_ROOT).parts[0]
        return _FIRST.index(place) if place in _FIRST else len(_FIRST)

    items.sort(key=rank)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By file, but tests/serving as one (xdist 3.8's own groups are not seen by pytest 9.2)."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "tests/serving" if file.startswith("tests/serving/") else file

    return ByFile(config, log)
