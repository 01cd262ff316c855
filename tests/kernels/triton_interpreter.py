"""Runs tests under Triton's interpreter, in a process of their own.

    @interpreted
    def test_something(dtype): ...

Triton decides when it is imported whether kernels are interpreted, and other tests of the same run (vLLM's) need it as
it is. One worker process serves all tests; it starts with the first one and ends with the run.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

_SWITCH = "TRITON_INTERPRET"


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """The test, run in the worker. Its arguments must be picklable."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        if os.environ.get(_SWITCH) == "1":
            test(**arguments)
        else:
            _worker().submit(_call, test.__module__, test.__name__, arguments).result()

    return run


def _call(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name)(**arguments)


@functools.cache
def _worker() -> ProcessPoolExecutor:
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    try:
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        pool.submit(os.getpid).result()  # started now, while the switch is set
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before
    atexit.register(pool.shutdown)
    return pool
