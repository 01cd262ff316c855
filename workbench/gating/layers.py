"""What each layer of checks saw of one arm: the evidence that `attribution` weighs.

    findings = look_at_arm(rules, "nvfp4", evidence)

A finding is "caught" where the layer alone shows a fault, "warned" where it saw something that need not be one, "clean"
where it looked and saw nothing, "not run" where it had nothing to look at. Which side a caught finding speaks for is
fixed here: a checkpoint's bytes and weights for "quantization", budgets and extraction for the "harness", what the
endpoint did with a request for the "serving path". docs/gating.md holds the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.gating.policy import Policy
from workbench.gating.weights import name_worst
from workbench.records import (
    ArtefactPanel,
    Comparison,
    Evaluation,
    LayerFinding,
    LintReport,
    LostAnswers,
    NumericsCard,
    Preflight,
    ServerRecord,
    TaskComparison,
    TensorEquality,
)
from workbench.statistics import judge_loss

QUANTIZATION, HARNESS, SERVING = "quantization", "harness", "serving path"

FORMAT_SQNR_DB = {
    "nvfp4": 20.4, "mxfp4": 15.2, "nvfp4_w4a8": 19.7, "mxfp6_e2m3": 27.2, "mxfp6_e3m2": 25.2, "mxfp8_e4m3": 30.0,
    "mxfp8_e5m2": 25.2, "fp8_tensor": 31.5, "fp8_channel": 31.5, "fp8_block": 31.5,
}  # fmt: skip
"""The lowest SQNR, dB, that a sound quantization was measured to give on normal, Student-t (5 degrees) and Laplace
weights, over all scale rules and two phases of the scale (tests/gating/test_attribution.py measures it again). Integer
formats have no such figure: theirs falls with the largest weight of a scale's group."""
ALLOWANCE_DB = 3.0
"""Real matrices have heavier tails than those three; what is broken lies 10 dB and more below."""

SHARE = 0.1
"""Least share of the lost answers, and least two of them, that must have met one fate for it to be named a cause."""
FATES = {
    "failed": SERVING, "null": SERVING, "cut_early": SERVING, "cut": HARNESS, "unfinished": HARNESS,
    "unextracted": HARNESS, "odd_finish": SERVING, "empty": "",
}  # fmt: skip
SAID = {
    "failed": "were never answered", "null": "came back null", "cut_early": "were cut below the tokens asked for",
    "cut": "used up their tokens", "unfinished": "ended within their thought",
    "unextracted": "are right by another extraction", "odd_finish": "ended for no known reason", "empty": "are empty",
}  # fmt: skip
HARD = ("failed", "null", "cut_early", "prompts", "stop_leaks")
"""Kinds of findings about answers and transport that no weights, however broken, can bring about."""
NOISE_ALPHA = 0.01
"""Two-sided level at which the A/A arm is said to differ from the baseline, over its tasks (Bonferroni)."""

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """All that a run left, by arm; None or empty where a stage did not run. rows: of tensors.parquet."""

    comparison: Comparison | None = None
    lint: Mapping[str, LintReport] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    equality: Mapping[str, TensorEquality] = field(default_factory=dict)
    evaluations: Mapping[str, Evaluation] = field(default_factory=dict)
    servers: Mapping[str, ServerRecord] = field(default_factory=dict)
    numerics: Mapping[str, NumericsCard] = field(default_factory=dict)
    preflights: Mapping[str, Preflight] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        return self.comparison.baseline if self.comparison is not None else ""

    def tasks(self, arm: str) -> list[TaskComparison]:
        """The arm's judged comparisons with the baseline."""
        rows = self.comparison.tasks if self.comparison is not None else ()
        return [row for row in rows if row.candidate == arm and row.primary]

    def panels(self, arm: str) -> tuple[ArtefactPanel, ...]:
        return self.evaluations[arm].panels if arm in self.evaluations else ()

    def lost(self, arm: str) -> list[LostAnswers]:
        """Of every task with a panel; empty unless all of them tell, and tell it against the baseline."""
        found = [panel.lost for panel in self.panels(arm)]
        told = [lost for lost in found if lost is not None and lost.baseline == self.baseline]
        return told if len(told) == len(found) else []


def look_at_arm(rules: Policy, arm: str, evidence: Evidence) -> list[LayerFinding]:
    """Every layer's findings about one arm, at least one a layer."""
    return [
        *_lint(rules, arm, evidence),
        *_bytes(arm, evidence),
        *_tensors(rules, arm, evidence),
        *_numerics(arm, evidence),
        *_preflight(arm, evidence),
        *_transport(arm, evidence),
        *_artefacts(rules, arm, evidence),
        *_noise(evidence),
        *_answers(rules, arm, evidence),
    ]


def has_lost(rules: Policy, row: TaskComparison) -> bool:
    """Whether a loss is established by the gate's own rule: significant alone, and above the margin."""
    margin = rules.margin(row.task) if rules.margin_pp else 0.0
    judged = judge_loss(loss_pp=row.loss_pp, loss_upper95_pp=row.loss_upper95_pp, p_loss=row.p_loss, margin_pp=margin)
    return judged == "fail"


def allowed_sqnr_db(first: str, second: str) -> float:
    """The least SQNR of weights in the first, then in the second format; NaN where a format has no figure.

    "dense" and "" add no noise. Noise powers add: the errors of two roundings are nearly uncorrelated.
    """
    formats = [name for name in (first, second) if name not in ("", "dense")]
    if not all(name in FORMAT_SQNR_DB for name in formats):
        return math.nan
    noise = sum(10.0 ** (-FORMAT_SQNR_DB[name] / 10.0) for name in formats)
    return -10.0 * math.log10(noise) - ALLOWANCE_DB if noise else math.inf


# ---- the checkpoint --------------------------------------------------------------------------------------------------


def _lint(rules: Policy, arm: str, evidence: Evidence) -> Iterator[LayerFinding]:
    report = evidence.lint.get(arm)
    if report is None:
        yield LayerFinding(layer="lint", status="not run", reason="the checkpoint was not linted")
        return
    errors = [finding for finding in report.errors if finding.check not in rules.lint_allow]
    warnings = [finding for finding in report.findings if finding.severity == "warning"]
    if errors:
        ids = ", ".join(dict.fromkeys(finding.check for finding in errors))
        where = f" ({errors[0].tensor})" if errors[0].tensor else ""
        reason = f"{ids}: {errors[0].message}{where}"
        yield LayerFinding(layer="lint", status="caught", reason=reason, cause=QUANTIZATION)
    elif warnings:
        ids = ", ".join(dict.fromkeys(finding.check for finding in warnings))
        yield LayerFinding(layer="lint", status="warned", reason=f"{ids}: {warnings[0].message}")
    else:
        yield LayerFinding(layer="lint", status="clean", reason=f"nothing in {report.tensors} tensors")


def _bytes(arm: str, evidence: Evidence) -> Iterator[LayerFinding]:
    found = evidence.equality.get(arm)
    if found is None:
        yield LayerFinding(layer="bytes", status="not run", reason="unquantized tensors were not compared")
        return
    bad = [*found.differing, *found.missing]
    reason = f"{found.compared} unquantized tensors are the source's"
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        reason = f"not the source's: {bad[0]}{more}"
    status, cause = ("caught", QUANTIZATION) if bad else ("clean", "")
    yield LayerFinding(layer="bytes", status=status, reason=reason, cause=cause)


def _tensors(rules: Policy, arm: str, evidence: Evidence) -> Iterator[LayerFinding]:
    values: dict[str, float] = {}
    bad: dict[str, float] = {}
    limits = []
    for row in evidence.rows:
        first, second = (str(row.get(key) or "") for key in ("first_format", "second_format"))
        of_arm = {
            row.get("direct_arm"): ("sqnr_direct_db", second, ""),
            row.get("first_arm"): ("sqnr_first_db", first, ""),
            row.get("second_arm"): ("sqnr_total_db", first, second),
        }
        if arm not in of_arm or arm == row.get("source_arm"):
            continue
        figure, *formats = of_arm[arm]
        least = allowed_sqnr_db(*formats)
        if math.isnan(least):
            least = rules.min_sqnr_db if rules.min_sqnr_db is not None else -math.inf
        found = row.get(figure)
        value = math.nan if found is None else float(found)
        values[row["name"]] = value
        limits.append(least)
        if math.isnan(value) or value < min(least, 200.0):  # an exact matrix is at +inf
            bad[row["name"]] = value
    if not values:
        yield LayerFinding(layer="tensors", status="not run", reason="the weights were not measured")
    elif bad:
        allowed = min(limits)
        limit = f"the {allowed:.1f} dB that its format allows" if math.isfinite(allowed) else "what its format allows"
        reason = f"{len(bad)} of {len(values)} matrices are below {limit}: {name_worst(bad, '.1f', ' dB')}"
        yield LayerFinding(layer="tensors", status="caught", reason=reason, cause=QUANTIZATION)
    elif not any(math.isfinite(limit) for limit in limits) and any(map(math.isfinite, values.values())):
        yield LayerFinding(layer="tensors", status="not run", reason="no figure says what this format allows")
    else:
        lowest = min(values.values())
        reason = f"{len(values)} matrices, the lowest at {lowest:.1f} dB, are what their format allows"
        yield LayerFinding(layer="tensors", status="clean", reason=reason)


# ---- the endpoint ----------------------------------------------------------------------------------------------------


def _numerics(arm: str, evidence: Evidence) -> Iterator[LayerFinding]:
    card = evidence.numerics.get(arm)
    if card is None or card.error:
        reason = card.error if card is not None else "what the server runs was not probed"
        yield LayerFinding(layer="numerics", status="not run", reason=reason)
    elif card.findings:
        more = f" (and {len(card.findings) - 1} more)" if len(card.findings) > 1 else ""
        reason = f"{card.findings[0]}{more}"
        yield LayerFinding(layer="numerics", status="caught", reason=reason, cause=SERVING)
    else:
        yield LayerFinding(layer="numerics", status="clean", reason=card.verdict)


def _preflight(arm: str, evidence: Evidence) -> Iterator[LayerFinding]:
    """A doubt that the baseline's preflight shares moves both arms; the arm's own is caught."""
    record, theirs = evidence.preflights.get(arm), evidence.preflights.get(evidence.baseline)
    if record is None:
        yield LayerFinding(layer="preflight", status="not run", reason="no preflight was kept")
        return
    shared = {finding.id for finding in theirs.findings} if theirs is not None else set()
    doubts = [finding for finding in record.findings if finding.level != "info"]
    own = [finding for finding in doubts if finding.id not in shared and theirs is not None]
    if record.errors or own:
        first = (*record.errors, *own)[0]
        reason = f"{first.id}: {first.message}"
        yield LayerFinding(layer="preflight", status="caught", reason=reason, cause=HARNESS)
    elif doubts:
        reason = f"{doubts[0].id}: {doubts[0].message}"
        yield LayerFinding(layer="preflight", status="warned", reason=reason)
    else:
        yield LayerFinding(layer="preflight", status="clean", reason=f"{len(record.tasks)} tasks, nothing refused")


def _transport(arm: str, evidence: Evidence) -> Iterator[LayerFinding]:
    """What the endpoint did with requests, whatever the answers were worth."""
    transport = evidence.evaluations[arm].transport if arm in evidence.evaluations else None
    lost = evidence.lost(arm)
    counted, differ = sum(of.prompts_counted for of in lost), sum(of.prompts_differ for of in lost)
    if differ:
        reason = (
            f"{differ} of {counted} prompts were counted with other tokens than by {lost[0].baseline}'s endpoint: "
            "another chat template or tokenizer"
        )
        yield LayerFinding(layer="transport", status="caught", reason=reason, cause=SERVING, kind="prompts")
    if transport is None:
        if not differ:
            yield LayerFinding(layer="transport", status="not run", reason="the client kept no record")
        return
    faults = ", ".join(f"{kind} {count}" for kind, count in transport.faults.items())
    if transport.failed:
        reason = f"{transport.failed} of {transport.requests} requests were never answered ({faults})"
        yield LayerFinding(layer="transport", status="caught", reason=reason, cause=SERVING, kind="failed")
    elif faults:
        yield LayerFinding(layer="transport", status="warned", reason=f"{faults}; every request was answered")
    elif not differ:
        reason = f"{transport.requests} requests, no fault"
        yield LayerFinding(layer="transport", status="clean", reason=reason)


# ---- the answers -----------------------------------------------------------------------------------------------------


def _artefacts(rules: Policy, arm: str, evidence: Evidence) -> Iterator[LayerFinding]:
    panels = evidence.panels(arm)
    lost = evidence.lost(arm)
    if not panels:
        yield LayerFinding(layer="artefacts", status="not run", reason="no artefact panel was kept")
        return
    leaks, answers = sum(panel.stop_leaks for panel in panels), sum(panel.n for panel in panels)
    theirs = sum(panel.stop_leaks for panel in evidence.panels(evidence.baseline))
    caught = list(_fates(rules, panels, lost))
    if leaks > theirs + SHARE * answers:
        reason = f"{leaks} of {answers} answers hold a stop string that the endpoint was sent"
        found = LayerFinding(layer="artefacts", status="caught", reason=reason, cause=SERVING, kind="stop_leaks")
        caught.append(found)
    if caught:
        yield from caught
    elif lost:
        whole, gone = sum(of.finished for of in lost), sum(of.lost for of in lost)
        reason = f"{whole} of {gone} lost answers are whole and plainly wrong"
        yield LayerFinding(layer="artefacts", status="clean", reason=reason)
    else:
        reason = "what became of the lost answers was not kept"
        yield LayerFinding(layer="artefacts", status="not run", reason=reason)


def _fates(rules: Policy, panels: tuple[ArtefactPanel, ...], lost: list[LostAnswers]) -> Iterator[LayerFinding]:
    """A fate that took a good part of what was lost; without a baseline's requests, one beyond the policy's limit."""
    gone = sum(of.lost for of in lost)
    for fate, cause in FATES.items():
        met = sum(getattr(of, fate) for of in lost)
        if met >= max(2.0, SHARE * gone):
            reason = f"{met} of {gone} lost answers {SAID[fate]}"
            yield LayerFinding(layer="artefacts", status="caught", reason=reason, cause=cause, kind=fate)
    if lost:
        return
    limits = {"empty": rules.max_empty_share, "cut": rules.max_truncated_share, "failed": rules.max_failed_share}
    for fate, limit in limits.items():
        for panel in panels:
            count = panel.truncated if fate == "cut" else getattr(panel, fate)
            if limit is not None and count > limit * panel.n:
                reason = f"{panel.task}: {count} of {panel.n} answers {SAID[fate]}"
                yield LayerFinding(layer="artefacts", status="caught", reason=reason, cause=FATES[fate], kind=fate)


def _noise(evidence: Evidence) -> Iterator[LayerFinding]:
    comparison = evidence.comparison
    if comparison is None or not comparison.noise_arm:
        yield LayerFinding(layer="noise", status="not run", reason="no A/A arm was compared")
        return
    rows = evidence.tasks(comparison.noise_arm)
    moved = [row for row in rows if row.p_two_sided < NOISE_ALPHA / len(rows)]
    most = max((row.discordance for row in rows), default=math.nan)
    if moved:
        reason = (
            f"{comparison.noise_arm}, the baseline again, differs from it on {moved[0].task} ({moved[0].lost} lost, "
            f"{moved[0].gained} gained): the same weights do not answer alike"
        )
        yield LayerFinding(layer="noise", status="caught", reason=reason, cause=SERVING)
    else:
        reason = f"the baseline again flips {100 * most:.1f} % of the answers at most, no more one way than the other"
        yield LayerFinding(layer="noise", status="clean", reason=reason)


def _answers(rules: Policy, arm: str, evidence: Evidence) -> Iterator[LayerFinding]:
    rows = evidence.tasks(arm)
    if not rows:
        yield LayerFinding(layer="answers", status="not run", reason="no answers were compared")
        return
    losses = [row for row in rows if has_lost(rules, row)]
    worst = max(losses or rows, key=lambda row: row.loss_pp)
    figures = f"{worst.task} {worst.filter}: {worst.lost} lost, {worst.gained} gained of {worst.n}"
    if losses:
        reason = f"{figures}, a loss of {worst.loss_pp:.2f} pp (p = {worst.p_loss:.2g})"
        yield LayerFinding(layer="answers", status="caught", reason=reason)
    else:
        above = "above the margin is established" if rules.margin_pp else "is established, and the policy judges none"
        reason = f"{figures}: no loss {above}"
        yield LayerFinding(layer="answers", status="clean", reason=reason)
