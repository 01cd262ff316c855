"""What the two entry points share: streams that are safe to print to, and how a command that could not run ends.

    safe_streams()
    try: ...
    except BaseException as error: return explain(error, again="continue with resume=latest")

Every exit 3 has a message on stderr with a way out. What a user can mend is that message alone; a bug keeps its
traceback.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
import traceback

from workbench.errors import WorkbenchError
from workbench.interrupt import Interrupted

COULD_NOT_RUN = 3
FULL = (errno.ENOSPC, errno.EDQUOT)
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)  # the file system's no, not a bug


def safe_streams() -> None:
    """A closed stdout or stderr goes nowhere instead of failing; what a stream cannot encode is escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - stands in until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def explain(error: BaseException, *, again: str) -> int:
    """Say on stderr why a command could not run, and how to get out; returns the exit code. again: after Ctrl-C."""
    if isinstance(error, WorkbenchError):
        complain(error.message, error.fix or "see --help")
    elif isinstance(error, (KeyboardInterrupt, Interrupted)):
        complain("interrupted", again)
    elif isinstance(error, BrokenPipeError):
        _leave_stdout()
        complain("what read the output has closed it", "let it read to the end, or write to a file")
    elif isinstance(error, OSError) and error.errno in FULL:
        _leave_stdout()
        complain(f"{error.filename or 'the output'} could not be written: its disk is full", "free space")
    elif isinstance(error, OSError) and error.filename and error.errno in REFUSED:
        complain(f"{error.filename}: {error.strerror}", "give a path that can be opened, or change its permissions")
    elif isinstance(error, MemoryError):
        complain(f"there is not enough memory: {error}", "give smaller sizes, or run where there is more memory")
    else:
        traceback.print_exception(error)
        complain("this is a bug in the workbench; the traceback above says where", "report it with the command line")
    return COULD_NOT_RUN


def complain(message: str, fix: str) -> None:
    """One message on stderr, in the style of workbench.errors."""
    print(f"error: {message}\n  fix: {fix}", file=sys.stderr)


def _leave_stdout() -> None:
    """Let what is still buffered go nowhere: Python would try to print it once more at its end, and exit 120."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
