"""Does a verdict still speak of what lies in its run folder, and does it agree with itself?

    judged = evidence_digests(run_dir, comparison)        # the gate keeps it: Verdict.judged
    changed_since(run_dir, verdict)                       # names of what changed, went or came since
    contradiction(verdict)                                # "" where status, exit code and checks agree

Contents alone count, under names relative to the run: a copied or renamed folder keeps its verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from .verdict import Comparison, GateCheck, Verdict

EXIT_CODES = {"pass": 0, "regression": 1, "inconclusive": 2, "invalid": 2, "failed": 3}
EVIDENCE = (  # what a gate reads of a run
    "comparison.json", "tensors.parquet", "serving_cost.json", "lint/*.json", "server/*.json", "equality/*.json",
    "eval/*/scores.json", "eval/*/*/preflight.json",
)  # fmt: skip
_RAW = (".audit.json", ".facts.json")
_STATUS_OF_CHECK = (("invalid", "invalid"), ("fail", "regression"), ("inconclusive", "inconclusive"))


def evidence_digests(run_dir: Path, comparison: Comparison | None) -> dict[str, str]:
    """sha256 of every file that a gate reads of the run, by its path in it, and of the answers as compared."""
    found = {str(path.relative_to(run_dir)): path for pattern in EVIDENCE for path in sorted(run_dir.glob(pattern))}
    digests = {name: _digest(path) for name, path in found.items() if not name.endswith(_RAW)}
    return {**digests, **(comparison.sources if comparison is not None else {})}


def changed_since(run_dir: Path, verdict: Verdict) -> tuple[str, ...]:
    """Names of the files that are not as the verdict's gate read them: changed, gone, or new."""
    now = evidence_digests(run_dir, None)
    now.update({name: _digest_within(run_dir, name) for name in verdict.judged if name not in now})
    return tuple(sorted(name for name in {*verdict.judged, *now} if verdict.judged.get(name) != now.get(name)))


def out_of_date(run_dir: Path, verdict: Verdict) -> Verdict:
    """The verdict itself, or, where what it judged has changed since, one of status "outdated" that says so, without
    checks: nothing of the old one may be taken for a judgement of what lies there now.
    """
    changed = changed_since(run_dir, verdict)
    if not changed:
        return verdict
    if verdict.judged:
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        what = f"what it judged has changed since ({', '.join(changed[:5])}{more})"
    else:
        what = "it does not say what it judged"
    return Verdict(
        status="outdated",
        exit_code=EXIT_CODES["invalid"],
        headline=f"Out of date: {what}. Judge the run again: `workbench gate RUN --policy …`, policy {verdict.policy}.",
        policy=verdict.policy,
        policy_note="",
        checks=(),
        judged=verdict.judged,
        policy_sha256=verdict.policy_sha256,
        policy_from=verdict.policy_from,
    )


def counts(check: GateCheck) -> bool:
    """Whether a check weighs on the status: an inconclusive one of the supporting tier does not."""
    return not (check.tier == "supporting" and check.status == "inconclusive")


def status_of(checks: Iterable[GateCheck]) -> str:
    """The status that checks give: invalid outranks regression outranks inconclusive outranks pass; none at all are
    invalid.
    """
    found = {check.status for check in checks if counts(check)}
    for check_status, status in _STATUS_OF_CHECK:
        if check_status in found:
            return status
    return "pass" if "pass" in found else "invalid"


def named(check: GateCheck) -> str:
    """A check with its arm, as a line of text names it: "nvfp4: lint"."""
    return f"{check.arm}: {check.name}" if check.arm else check.name


def contradiction(verdict: Verdict) -> str:
    """Why the verdict cannot be a gate's: status, exit code and checks do not belong together; "" where they do."""
    if verdict.status not in EXIT_CODES:
        return f"status {verdict.status[:40]!r} is none of {', '.join(EXIT_CODES)}"
    if verdict.exit_code != EXIT_CODES[verdict.status]:
        return f"status {verdict.status} goes with exit code {EXIT_CODES[verdict.status]}, not {verdict.exit_code}"
    given = status_of(verdict.checks)
    if verdict.status not in (given, "failed"):
        return f"status {verdict.status} contradicts its {len(verdict.checks)} checks, which give {given}"
    return ""


def _digest_within(run_dir: Path, name: str) -> str:
    """ "" for a name that leads out of the run."""
    inside = not Path(name).is_absolute() and ".." not in Path(name).parts
    return _digest(run_dir / name) if inside else ""


def _digest(path: Path) -> str:
    """ "" for what cannot be read: gone, or no regular file."""
    if not path.is_file():
        return ""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError:
        return ""
