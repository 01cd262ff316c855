"""Makes `workbench` importable from this checkout, for scripts that run where it is not installed.

from_source.make_importable()      # before `from workbench.kernels import …`
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def make_importable() -> None:
    """`workbench.kernels` from this checkout where the workbench is not installed."""
    if importlib.util.find_spec("workbench") is not None and importlib.util.find_spec("workbench.kernels") is not None:
        return
    for name, location in (("workbench", ROOT / "workbench"), ("workbench.kernels", ROOT / "kernels")):
        spec = importlib.util.spec_from_file_location(
            name, location / "__init__.py", submodule_search_locations=[str(location)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
