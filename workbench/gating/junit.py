"""A verdict as JUnit XML, one test case a check, for the test views of CI systems.

A failed check is a `failure`; invalid and inconclusive ones are `error`s, since a gate that did not pass must not
look green; a reported one is `skipped`, and so is an undecided one of the supporting tier. Reasons are also in
`system-out`, so that passing cases show their figures.
"""

from __future__ import annotations

from xml.etree import ElementTree

from workbench.records import GateCheck, Verdict


def to_junit(verdict: Verdict) -> str:
    """The content of junit.xml."""
    checks = verdict.checks or (
        GateCheck(name="verdict", arm="", status=_CHECK_STATUS[verdict.status], reason=verdict.headline),
    )
    count = {tag: sum(_tag(check) == tag for check in checks) for tag in ("failure", "error", "skipped")}
    totals = {
        "tests": str(len(checks)),
        "failures": str(count["failure"]),
        "errors": str(count["error"]),
        "skipped": str(count["skipped"]),
    }
    root = ElementTree.Element("testsuites", totals)
    suite = ElementTree.SubElement(root, "testsuite", {"name": f"gate: {verdict.policy}", **totals})
    properties = ElementTree.SubElement(suite, "properties")
    for key, value in (
        ("verdict", verdict.status),
        ("exit_code", str(verdict.exit_code)),
        ("headline", verdict.headline),
        ("policy_note", verdict.policy_note),
        ("policy_from", verdict.policy_from),
    ):
        ElementTree.SubElement(properties, "property", {"name": key, "value": _clean(value)})
    for check in checks:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": f"gate.{check.arm or 'run'}", "name": _clean(check.name), "time": "0"}
        )
        tag = _tag(check)
        if tag is not None:
            found = ElementTree.SubElement(case, tag, {"message": _clean(f"{check.status}: {check.reason}")})
            if tag != "skipped":
                found.set("type", check.status)
        ElementTree.SubElement(case, "system-out").text = _clean(check.reason)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _tag(check: GateCheck) -> str | None:
    undecided = check.tier == "supporting" and check.status == "inconclusive"
    return "skipped" if undecided else _TAG.get(check.status)


_TAG = {"fail": "failure", "invalid": "error", "inconclusive": "error", "reported": "skipped"}
_CHECK_STATUS = {
    "pass": "pass",
    "regression": "fail",
    "inconclusive": "inconclusive",
    "invalid": "invalid",
    "failed": "invalid",
}


def _clean(text: str) -> str:
    """Without the control characters that XML 1.0 cannot hold."""
    return "".join(c for c in text if c in "\t\n\r" or (ord(c) >= 32 and ord(c) not in (0xFFFE, 0xFFFF)))
