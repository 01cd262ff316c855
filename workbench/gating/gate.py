"""The verdict: a policy and the records of a run in, one status and the checks behind it out.

    verdict = gate(policy, comparison=comparison, lint=reports, tensors=frame, evaluations=evaluations)
    sys.exit(verdict.exit_code)

The rule for the answers, for every gated arm and every task's primary filter, with its margin in percentage points
(pp):

- **pass**: the one-sided 95 % upper bound of the loss is below the margin. (No loss shown is not enough: the data
  must exclude one.)
- **fail**: the loss is significantly above zero (exact one-sided McNemar, 5 %) *and* as large as observed above the
  margin.
- **inconclusive**: anything else. More items would decide.

All gated checks must pass for "pass". So an arm that truly loses the margin on any one task passes in at most 5 % of
runs, however many tasks there are, and no correction for several tests is needed on that side. Beside the answers
stand the weights (a matrix that lost its meaning fails the run, also where few items cannot see it) and the evidence
(lint errors, missing or empty evaluations, a baseline with no room to fall: "invalid", since such a run shows nothing
either way). Invalid outranks regression outranks inconclusive outranks pass. Exit codes: 0 pass, 1 regression, 2
inconclusive or invalid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from workbench.gating.evidence import check_evaluations, check_lint, check_room
from workbench.gating.policy import Policy, read_policy
from workbench.gating.weights import check_weights
from workbench.records import Comparison, Evaluation, GateCheck, LintReport, TaskComparison, Verdict

EXIT_CODES = {"pass": 0, "regression": 1, "inconclusive": 2, "invalid": 2, "failed": 3}
ALPHA = 0.05
_STATUS_OF_CHECK = (("invalid", "invalid"), ("fail", "regression"), ("inconclusive", "inconclusive"))


def gate(
    policy: Mapping[str, Any] | Policy,
    *,
    comparison: Comparison | None,
    lint: Mapping[str, LintReport] | None = None,
    tensors: Any = None,
    evaluations: Mapping[str, Evaluation] | None = None,
) -> Verdict:
    """Judge a run. tensors: rows of tensors.parquet (mappings with the keys of `TensorRecord`, or a DataFrame).

    comparison None: no answers were compared (a run that stopped at a lint error); then nothing can pass.
    evaluations: of all arms, for counts of empty and cut answers. Raises ConfigError for a policy that is not
    understood.
    """
    rules = policy if isinstance(policy, Policy) else read_policy(policy)
    checks: list[GateCheck] = []
    checks += check_lint(rules, lint or {})
    checks += check_weights(rules, _rows(tensors))
    checks += check_evaluations(rules, comparison, evaluations or {})
    if comparison is not None:
        checks += check_room(rules, comparison)
        checks += [_judge(rules, task) for task in comparison.tasks if task.candidate in rules.gated + rules.reported]
    status = _overall(checks)
    return Verdict(
        status=status,
        exit_code=EXIT_CODES[status],
        headline=_headline(status, rules, checks),
        policy=rules.name,
        policy_note=rules.note,
        checks=tuple(checks),
    )


def judge_loss(*, loss_pp: float, loss_upper95_pp: float, p_loss: float, margin_pp: float) -> str:
    """ "pass", "fail" or "inconclusive": the rule of the module docstring, on figures in percentage points."""
    if loss_upper95_pp < margin_pp:
        return "pass"
    if p_loss < ALPHA and loss_pp > margin_pp:
        return "fail"
    return "inconclusive"


def _judge(rules: Policy, task: TaskComparison) -> GateCheck:
    margin = rules.margin(task.task)
    gated = task.candidate in rules.gated and task.primary
    status = judge_loss(
        loss_pp=task.loss_pp, loss_upper95_pp=task.loss_upper95_pp, p_loss=task.p_loss, margin_pp=margin
    )
    return GateCheck(
        name=f"accuracy {task.task} {task.filter}",
        arm=task.candidate,
        status=status if gated else "reported",
        reason=_accuracy_reason(task, margin, status),
        value=task.loss_upper95_pp,
        limit=margin,
        unit="pp",
    )


def _accuracy_reason(task: TaskComparison, margin: float, status: str) -> str:
    figures = (
        f"{task.baseline} {100 * task.baseline_value:.1f} %, {task.candidate} {100 * task.candidate_value:.1f} % of "
        f"{task.n} items ({task.lost} lost, {task.gained} gained): loss {task.loss_pp:.2f} pp, 95 % upper bound "
        f"{task.loss_upper95_pp:.2f} pp, margin {margin:g} pp, p(no loss) = {task.p_loss:.2g}"
    )
    if status == "pass":
        return f"{figures}. A loss of {margin:g} pp or more is excluded."
    if status == "fail":
        return f"{figures}. The loss is significant and above the margin."
    return (
        f"{figures}. The data neither exclude a loss of {margin:g} pp nor show one; "
        f"with {task.n} items a loss of {task.mde_pp:.2f} pp is found in 80 % of runs."
    )


def _overall(checks: Iterable[GateCheck]) -> str:
    found = {check.status for check in checks}
    for check_status, status in _STATUS_OF_CHECK:
        if check_status in found:
            return status
    return "pass" if "pass" in found else "invalid"


def _headline(status: str, rules: Policy, checks: list[GateCheck]) -> str:
    if status == "pass":
        judged = [check for check in checks if check.status == "pass" and check.name.startswith("accuracy ")]
        worst = max(judged, key=lambda check: check.value - check.limit)
        return (
            f"Pass: {', '.join(rules.gated)} lose less than the margin on every task "
            f"(closest: {worst.arm} on {worst.name.split()[1]}, at most {worst.value:.2f} of {worst.limit:g} pp)."
        )
    wanted = {"regression": "fail"}.get(status, status)
    causes = [check for check in checks if check.status == wanted]
    word = {"regression": "Regression", "inconclusive": "Inconclusive", "invalid": "Invalid"}[status]
    if not causes:
        return f"{word}: nothing was judged."
    more = f" (and {len(causes) - 1} more)" if len(causes) > 1 else ""
    about = f"{causes[0].arm}: " if causes[0].arm else ""
    return f"{word}: {about}{causes[0].name}{more}. {causes[0].reason}"


def _rows(tensors: Any) -> list[Mapping[str, Any]]:
    if tensors is None:
        return []
    if hasattr(tensors, "to_dict"):
        return list(tensors.to_dict("records"))
    return list(tensors)
