"""The way out of a file that could not be written is its cause's."""

from __future__ import annotations

import errno
import os

import pytest

from workbench.errors import OutputError, full_disk


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "free space"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "free space"),
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), "check permissions"),
        (OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG)), "shorter name"),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), "free space"),
        (RuntimeError("Error while serializing: I/O error: Permission denied (os error 13)"), "check permissions"),
        (RuntimeError("something else (really)"), "another output folder"),
    ],
)
def test_a_write_error_has_the_way_out_of_its_cause(error: Exception, fix: str) -> None:
    found = OutputError.of("out.json", error)
    assert fix in found.fix
    assert "could not write out.json" in str(found)
    assert ("free space" in found.fix) == (fix == "free space")


def test_a_full_disk_is_found_among_what_an_error_was_raised_from() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/cache/x")
    generating, handling = ValueError("An error occurred while generating the dataset"), KeyError("x")
    generating.__cause__ = full
    handling.__context__ = generating
    assert full_disk(generating) is full
    assert full_disk(handling) is full
    told = RuntimeError("I/O error: No space left on device (os error 28)")
    assert full_disk(told) is told
    assert full_disk(OSError(errno.EACCES, os.strerror(errno.EACCES))) is None
