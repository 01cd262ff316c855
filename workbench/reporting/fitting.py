"""Leave out the files of a run that read well but whose contents do not fit what is made of them.

files, pages = draw_fitting(load_run(run_dir), render)     # files.problems names what was left out

Which file it is shows only by drawing without it: first kind by kind (all evaluations, all servers; before all
analysis.json, whose keys nothing else checks), then as many kinds as it takes, and of what was left out each file that
can be drawn after all comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .load import RunFiles

T = TypeVar("T")
MISFIT = (ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError)


def draw_fitting(
    files: RunFiles, draw: Callable[[RunFiles], T], *, misfit: tuple[type[Exception], ...] = MISFIT
) -> tuple[RunFiles, T]:
    """The files that fit, and what `draw` makes of them. misfit: errors by which `draw` says that contents do not fit;
    where leaving files out does not help, the first is raised."""
    try:
        return files, draw(files)
    except misfit as error:
        why = f"its contents do not fit ({type(error).__name__}: {error})"
        left_out = _enough_to_leave_out(files, draw, misfit)
        if not left_out:
            raise
    for name in list(left_out):
        back = [other for other in left_out if other != name]
        if back and _draws(files.without(back, why), draw, misfit):
            left_out = back
    files = files.without(left_out, why)
    return files, draw(files)


def _enough_to_leave_out(
    files: RunFiles, draw: Callable[[RunFiles], T], misfit: tuple[type[Exception], ...]
) -> list[str]:
    kinds: dict[str, list[str]] = {}
    for name, (attribute, _) in files.sources.items():
        kinds.setdefault(attribute, []).append(name)
    groups = [kinds[attribute] for attribute in sorted(kinds, key=lambda attribute: attribute != "analysis")]
    prefixes = [[name for group in groups[:n] for name in group] for n in range(2, len(groups) + 1)]
    return next((names for names in [*groups, *prefixes] if _draws(files.without(names, ""), draw, misfit)), [])


def _draws(files: RunFiles, draw: Callable[[RunFiles], T], misfit: tuple[type[Exception], ...]) -> bool:
    try:
        draw(files)
    except misfit:
        return False
    return True
