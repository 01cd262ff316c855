"""How the suite is spread over two processes (`pytest -n 2 --dist loadgroup --no-loadscope-reorder`, see Makefile).

Tests of one file share fixtures and stay together; so do all of tests/serving, which share their engines. What takes
longest starts first, an engine beside what needs none, so that neither process ends alone.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # idle threads sleep: the other process has work

_ROOT = Path(__file__).parent
# By measured minutes, most first; everything else follows in its own order.
_FIRST = ("serving", "kernels", "test_demo.py", "analysis", "test_studies.py", "test_bad_input.py", "reporting")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {item: item.path.relative_to(_ROOT).parts for item in items}
    for item, parts in places.items():
        item.add_marker(pytest.mark.xdist_group("serving" if parts[0] == "serving" else "/".join(parts)))
    items.sort(key=lambda item: _FIRST.index(places[item][0]) if places[item][0] in _FIRST else len(_FIRST))
