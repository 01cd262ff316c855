"""Runs tests under Triton's interpreter, in a process of their own.

    @interpreted
    def test_something(dtype): ...

Triton decides when it is imported whether kernels are interpreted, and other tests of the same run (vLLM's) need it as
it is. One worker process serves all tests; it starts with the first one and ends with the run.

The interpreter combines one element after the other where a reduction is not one of Triton's own, which takes most of
these tests' time: the worker hands `triton_elements.larger` to numpy's maximum, which treats NaN alike
(`test_the_largest_is_reduced_at_once_as_one_by_one`).
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


def reduce_at_once() -> None:
    """Make the interpreter of this process reduce by `larger` with numpy; `ReduceOps.one_by_one` is its own way."""
    import numpy as np
    from triton.runtime.interpreter import ReduceOps
    from workbench.kernels.triton_elements import larger

    one_by_one = ReduceOps.generic_reduce

    def generic_reduce(self: Any, input: Any) -> Any:
        if self.combine_fn is not larger or self.axis is None or len(input) != 1:
            return one_by_one(self, input)
        data = np.maximum.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return [self.to_tensor(data, input[0].dtype)]

    ReduceOps.one_by_one, ReduceOps.generic_reduce = one_by_one, generic_reduce


def _call(module: str, name: str, arguments: dict[str, Any]) -> None:
    getattr(importlib.import_module(module), name)(**arguments)


@functools.cache
def _worker() -> ProcessPoolExecutor:
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "1"
    try:
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        pool.submit(reduce_at_once).result()  # started now, while the switch is set
    finally:
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before
    atexit.register(pool.shutdown)
    return pool
