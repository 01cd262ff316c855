"""Read one matrix of every arm ahead of the one that is being measured.

    for name, arms in read_ahead(names, lambda name: read_arms(name)):
        ...

At most two matrices are held: the one in work and the next. Reading takes a thread of its own, because decoding and
measuring keep the others busy and a read waits for the disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from workbench.errors import WorkbenchError

T = TypeVar("T")
U = TypeVar("U")


def read_ahead(names: Iterable[str], read: Callable[[str], T]) -> Iterator[tuple[str, T | WorkbenchError]]:
    """(name, read(name)) in order, reading one ahead. A WorkbenchError of a read is handed on as a value: one matrix
    that cannot be read does not end a pass. Any other exception is raised."""
    with ThreadPoolExecutor(1, thread_name_prefix="workbench-read") as pool:
        waiting: tuple[str, Future[T | WorkbenchError]] | None = None
        try:
            for name in names:
                following = (name, pool.submit(_attempt, read, name))
                if waiting is not None:
                    yield waiting[0], waiting[1].result()
                waiting = following
            if waiting is not None:
                yield waiting[0], waiting[1].result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def work_ahead(items: Iterable[T], work: Callable[[T], U], workers: int) -> Iterator[U]:
    """work(item) in order, `workers` of them at once in threads; with one, in this thread, when it is asked for."""
    if workers == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="workbench-work") as pool:
        waiting: deque[Future[U]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) == workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _attempt(read: Callable[[str], T], name: str) -> T | WorkbenchError:
    try:
        return read(name)
    except WorkbenchError as error:
        return error
