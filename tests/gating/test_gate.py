"""The rule of the verdict, its exit codes, and every reason why a run is not a pass."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.errors import ConfigError
from workbench.gating import gate, read_policy, to_junit
from workbench.records import Comparison, Evaluation, LintFinding, LintReport, TaskComparison, TaskScore
from workbench.statistics import judge_loss, loss_interval, loss_upper_bound, mcnemar_exact

POLICY: dict[str, Any] = {
    "name": "smoke",
    "note": "few items",
    "margin_pp": {"default": 10.0, "strictly": 2.0},
    "gated": ["nvfp4", "requant"],
    "reported": ["direct"],
    "weights": {"min_sqnr_db": 10.0},
    "evidence": {"chance": {"letters": 0.1}, "max_empty_share": 0.05, "max_truncated_share": 0.1},
}


_upper_bound = functools.cache(loss_upper_bound)


def _task(
    candidate: str, lost: int, gained: int, *, task: str = "sums", n: int = 200, both: int = 150, **changes: Any
) -> Any:
    low, high = loss_interval(lost, gained, n)
    figures = {
        "task": task,
        "filter": "strict",
        "metric": "exact_match",
        "baseline": "source",
        "candidate": candidate,
        "n": n,
        "both": both,
        "lost": lost,
        "gained": gained,
        "neither": n - both - lost - gained,
        "baseline_value": (both + lost) / n,
        "candidate_value": (both + gained) / n,
        "loss_pp": 100 * (lost - gained) / n,
        "loss_low_pp": 100 * low,
        "loss_high_pp": 100 * high,
        "loss_upper95_pp": 100 * _upper_bound(lost, gained, n),
        "p_loss": mcnemar_exact(lost, gained, "greater"),
        "p_two_sided": mcnemar_exact(lost, gained),
        "recovery_percent": 100.0,
        "recovery_low_percent": 99.0,
        "recovery_high_percent": 101.0,
        "discordance": (lost + gained) / n,
        "mde_pp": 3.0,
        "primary": True,
    }
    return TaskComparison(**{**figures, **changes})


def _comparison(*tasks: TaskComparison) -> Comparison:
    return Comparison(baseline="source", noise_arm="", tasks=tasks)


def _good(*extra: TaskComparison) -> Comparison:
    return _comparison(_task("nvfp4", 2, 1), _task("requant", 3, 2), *extra)


def _lint(*findings: LintFinding) -> LintReport:
    return LintReport(
        checkpoint="c",
        dialect="modelopt",
        checks=("nan_scale",),
        findings=findings,
        quantized_tensors=1,
        tensors=2,
        seconds=0.1,
    )


def _row(name: str, first: float, total: float) -> dict[str, Any]:
    return {
        "name": name,
        "source_arm": "source",
        "first_arm": "nvfp4",
        "second_arm": "requant",
        "sqnr_first_db": first,
        "sqnr_total_db": total,
    }


def _only(verdict: Any, status: str) -> list[Any]:
    return [check for check in verdict.checks if check.status == status]


def test_pass_needs_every_gated_arm_and_task() -> None:
    verdict = gate(POLICY, comparison=_good())
    assert (verdict.status, verdict.exit_code) == ("pass", 0)
    assert "requant on sums" in verdict.headline
    assert "of 10 pp" in verdict.headline
    assert (verdict.policy, verdict.policy_note) == (
        "smoke",
        "few items. Margin: 10 pp a task, 2 pp on strictly.",
    )
    assert all(check.reason and check.unit == "pp" for check in verdict.checks)


def test_regression_is_a_significant_loss_above_the_margin() -> None:
    verdict = gate(POLICY, comparison=_comparison(_task("nvfp4", 2, 1), _task("requant", 60, 5, both=100)))
    assert (verdict.status, verdict.exit_code) == ("regression", 1)
    (check,) = _only(verdict, "fail")
    assert check.arm == "requant"
    assert "loss 27.50 pp" in check.reason
    assert "60 lost, 5 gained" in check.reason
    assert verdict.headline.startswith("Regression: requant: accuracy sums strict.")


def test_too_few_items_are_inconclusive_not_a_pass() -> None:
    verdict = gate(POLICY, comparison=_comparison(_task("nvfp4", 0, 0, n=25, both=22), _task("requant", 2, 1)))
    assert (verdict.status, verdict.exit_code) == ("inconclusive", 2)
    (check,) = _only(verdict, "inconclusive")
    assert check.value == pytest.approx(100 * (1 - 0.05 ** (1 / 25)), rel=1e-3)  # rule of three, 11.3 pp
    assert "neither exclude" in check.reason


def test_margin_of_the_task_counts() -> None:
    task = _task("requant", 3, 2, task="strictly")
    verdict = gate(POLICY, comparison=_comparison(_task("nvfp4", 0, 0, task="strictly"), task))
    assert verdict.status == "inconclusive"
    assert {check.limit for check in verdict.checks} == {2.0}


def test_reported_arm_and_other_filters_never_decide() -> None:
    bad = _task("direct", 100, 0, both=50)
    flexible = _task("nvfp4", 100, 0, both=50, filter="flexible", primary=False)
    verdict = gate(POLICY, comparison=_good(bad, flexible))
    assert verdict.status == "pass"
    assert len(_only(verdict, "reported")) == 2
    assert any("above the margin" in check.reason for check in _only(verdict, "reported"))


def test_lint_errors_make_a_run_invalid_unless_allowed() -> None:
    nan = LintFinding(check="nan_scale", severity="error", message="weight_scale holds NaN", tensor="a.b.weight_scale")
    for comparison in (None, _good()):
        verdict = gate(POLICY, comparison=comparison, lint={"nvfp4": _lint(nan), "requant": _lint()})
        assert (verdict.status, verdict.exit_code) == ("invalid", 2)
        assert "nan_scale" in verdict.headline
        assert "a.b.weight_scale" in verdict.headline
    allowed = {**POLICY, "lint": {"allow": ["nan_scale"]}}
    verdict = gate(allowed, comparison=_good(), lint={"nvfp4": _lint(nan), "requant": _lint()})
    assert verdict.status == "pass"
    assert "1 more allowed" in verdict.checks[0].reason
    warning = dataclasses.replace(nan, severity="warning")
    both = {"nvfp4": _lint(warning), "requant": _lint()}
    assert gate(POLICY, comparison=_good(), lint=both).status == "pass"
    assert gate(POLICY, comparison=_good(), lint={**both, "direct": _lint(nan)}).status == "pass"
    assert gate(POLICY, comparison=_good(), lint={**both, "source": _lint(nan)}).status == "invalid"
    assert gate(POLICY, comparison=_good(), lint={"nvfp4": _lint()}).status == "invalid"  # requant's is missing


@pytest.mark.parametrize("broken", [0.0, -3.2, math.nan, None])
def test_a_broken_matrix_is_a_regression_that_names_it(broken: float | None) -> None:
    rows = [_row(f"layer.{i}.weight", 20.4, 16.7) for i in range(40)]
    rows[7] = _row("layer.7.weight", broken, 16.7)  # type: ignore[arg-type]
    verdict = gate(POLICY, comparison=_good(), tensors=rows)
    assert (verdict.status, verdict.exit_code) == ("regression", 1)
    (check,) = _only(verdict, "fail")
    assert (check.arm, check.name, check.unit) == ("nvfp4", "weights sqnr", "dB")
    assert "1 of 40 matrices" in check.reason
    assert "layer.7.weight" in check.reason
    passed = next(c for c in verdict.checks if c.name == "weights sqnr" and c.arm == "requant")
    assert passed.status == "pass"
    assert "lowest 16.7 dB" in passed.reason


def test_weights_accept_a_frame_and_exact_matrices() -> None:
    import pandas

    frame = pandas.DataFrame([_row("a", math.inf, 16.7), _row("b", 20.4, 9.9), _row("b", 20.4, 16.0)])
    verdict = gate(POLICY, comparison=_good(), tensors=frame)
    (check,) = _only(verdict, "fail")
    assert check.arm == "requant"
    assert "b (9.9 dB)" in check.reason
    assert check.value == 9.9


def test_outlier_check_compares_with_the_arms_median() -> None:
    policy = {**POLICY, "weights": {"max_below_median_db": 3.0}}
    rows = [_row(f"m{i}", 20.4, 16.7) for i in range(9)]
    assert gate(policy, comparison=_good(), tensors=rows).status == "pass"
    verdict = gate(policy, comparison=_good(), tensors=[*rows, _row("odd", 17.0, 16.7)])
    (check,) = _only(verdict, "fail")
    assert "odd (17.0 dB)" in check.reason
    assert "median of 20.4 dB" in check.reason


def test_missing_evaluations_are_invalid() -> None:
    verdict = gate(POLICY, comparison=_comparison(_task("nvfp4", 0, 0)))
    assert (verdict.status, verdict.exit_code) == ("invalid", 2)
    assert "requant" in verdict.headline
    half = _comparison(_task("nvfp4", 0, 0), _task("nvfp4", 0, 0, task="letters"), _task("requant", 0, 0))
    (check,) = _only(gate(POLICY, comparison=half), "invalid")
    assert "no result for letters" in check.reason
    assert gate(POLICY, comparison=None).status == "invalid"
    assert gate(POLICY, comparison=_comparison()).status == "invalid"


def test_items_below_the_minimum_are_invalid() -> None:
    policy = {**POLICY, "evidence": {"min_items": 201}}
    checks = _only(gate(policy, comparison=_good()), "invalid")
    assert "200 items were scored, the policy asks for 201" in checks[0].reason


def test_baseline_at_chance_has_no_room_to_fall() -> None:
    guessing = [_task(arm, 5, 5, task="letters", both=20) for arm in ("nvfp4", "requant")]
    verdict = gate(POLICY, comparison=_comparison(*guessing))
    assert verdict.status == "invalid"
    (check,) = _only(verdict, "invalid")
    assert (check.name, check.arm) == ("room to fall letters", "source")
    assert "12.5 % right" in check.reason
    assert "no room to lose" in check.reason


def _evaluation(arm: str, **counts: int) -> Evaluation:
    score = TaskScore(
        arm=arm,
        task="sums",
        filter="strict",
        metric="exact_match",
        n=200,
        value=0.8,
        low=0.7,
        high=0.9,
        num_fewshot=0,
        samples="",
        primary=True,
        **counts,
    )
    return Evaluation(
        arm=arm, scores=(score,), command=(), harness="h", request_order="forward", concurrency=1, seconds=1.0
    )


def _evaluations(**counts: dict[str, int]) -> dict[str, Evaluation]:
    """Every arm's, with the counts given for some."""
    return {arm: _evaluation(arm, **counts.get(arm, {})) for arm in ("source", "nvfp4", "requant", "direct")}


@pytest.mark.parametrize("arm", ["source", "nvfp4"])
def test_a_compared_arm_whose_scores_are_gone_is_invalid(arm: str) -> None:
    evaluations = _evaluations()
    del evaluations[arm]
    verdict = gate(POLICY, comparison=_good(), evaluations=evaluations)
    assert verdict.status == "invalid"
    assert f"{arm}: evaluation. its answers were compared, but its scores.json is gone" in verdict.headline
    assert gate(POLICY, comparison=_good()).status == "pass"  # where evaluations are not known at all


def test_empty_and_cut_answers_stand_in_the_way_of_a_pass() -> None:
    fine = _evaluations(source={"empty": 10, "truncated": 20})
    assert gate(POLICY, comparison=_good(), evaluations=fine).status == "pass"
    baseline = _evaluations(source={"empty": 11})
    assert gate(POLICY, comparison=_good(), evaluations=baseline).status == "invalid"
    arm = _evaluations(requant={"truncated": 21})
    verdict = gate(POLICY, comparison=_good(), evaluations=arm)
    assert verdict.status == "inconclusive"
    assert "21 of 200 answers are truncated (10.5 %" in verdict.headline
    shown = _evaluations(direct={"empty": 200})
    assert gate(POLICY, comparison=_good(), evaluations=shown).status == "pass"
    # a policy of thresholds alone keeps its limits
    thresholds = {**POLICY, "margin_pp": None, "thresholds": [{"task": "sums", "value": 0.5}]}
    assert gate(thresholds, comparison=None, evaluations=fine).status == "pass"
    assert gate(thresholds, comparison=None, evaluations=arm).status == "inconclusive"
    # a broken arm stays a regression, whatever its answers look like
    broken = _comparison(_task("nvfp4", 2, 1), _task("requant", 150, 0, both=0))
    evaluations = _evaluations(requant={"empty": 200})
    assert gate(POLICY, comparison=broken, evaluations=evaluations).status == "regression"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"margin_p": 1.0}, r"(?s)unknown key 'margin_p'.*'margin_pp'"),
        ({"weights": {"min_sqnr": 1.0}}, r"(?s)gate.weights: unknown key 'min_sqnr'.*'min_sqnr_db'"),
        ({"evidence": {"chances": {}}}, "unknown key 'chances'"),
        ({"lint": ["nan"]}, "gate.lint="),
        ({"lint": {"allow": "nan"}}, "gate.lint.allow='nan'"),
        ({"gated": []}, "names no arm"),
        ({"gated": "nvfp4"}, "gate.gated='nvfp4'"),
        ({"reported": ["nvfp4"]}, "both in gate.gated and in gate.reported"),
        ({"margin_pp": {"sums": 1.0}}, "no `default`"),
        ({"margin_pp": 0}, r"margin_pp \(default\) is 0"),
        ({"margin_pp": None}, r"margin_pp \(default\) is None"),
        ({"margin_pp": {"default": 1.0, "x": "2"}}, r"margin_pp \(x\) is '2'"),
        ({"evidence": {"max_empty_share": 5}}, "max_empty_share=5"),
        ({"evidence": {"min_items": 0}}, "min_items=0"),
    ],
)
def test_policy_typos_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_policy({**POLICY, **change})


def test_one_margin_for_all_is_a_number() -> None:
    assert read_policy({**POLICY, "margin_pp": 3}).margin("anything") == 3.0


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), st.floats(0.01, 100.0), st.data())
def test_rule_is_one_of_three_and_never_contradicts_the_data(n: int, margin: float, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, n))
    gained = data.draw(st.integers(0, n - lost))
    loss = 100 * (lost - gained) / n
    upper = max(loss, 100 * loss_interval(lost, gained, n, confidence=0.90)[1])
    p = mcnemar_exact(lost, gained, "greater")
    status = judge_loss(loss_pp=loss, loss_upper95_pp=upper, p_loss=p, margin_pp=margin)
    if status == "pass":
        assert loss < margin
        assert upper < margin
    elif status == "fail":
        assert loss > margin
        assert p < 0.05
        assert lost > gained
    else:
        assert status == "inconclusive"
        assert upper >= margin
        assert p >= 0.05 or loss <= margin
    wider = judge_loss(loss_pp=loss, loss_upper95_pp=upper, p_loss=p, margin_pp=margin * 1.5)
    order = ["fail", "inconclusive", "pass"]
    assert order.index(wider) >= order.index(status)  # a wider margin is never stricter


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["pass", "fail", "inconclusive", "lint", "room"]), min_size=1, max_size=4))
def test_worst_check_decides(kinds: list[str]) -> None:
    tables = {
        "pass": (2, 1, 150),
        "fail": (60, 5, 100),
        "inconclusive": (30, 14, 100),
        "room": (2, 1, 0),
        "lint": (2, 1, 150),
    }
    tasks = []
    for i, kind in enumerate(kinds):
        lost, gained, both = tables[kind]
        tasks += [_quick(arm, lost, gained, both, f"t{i}") for arm in ("nvfp4", "requant")]
    error = LintFinding(check="nan_scale", severity="error", message="m")
    lint = {"nvfp4": _lint(error)} if "lint" in kinds else {}
    verdict = gate(POLICY, comparison=_comparison(*tasks), lint=lint)
    if {"lint", "room"} & set(kinds):
        expected = ("invalid", 2)
    elif "fail" in kinds:
        expected = ("regression", 1)
    elif "inconclusive" in kinds:
        expected = ("inconclusive", 2)
    else:
        expected = ("pass", 0)
    assert (verdict.status, verdict.exit_code) == expected


def _quick(arm: str, lost: int, gained: int, both: int, task: str) -> Any:
    return dataclasses.replace(_task(arm, lost, gained, both=both), task=task)


def test_junit_has_one_case_a_check_and_is_not_green_unless_passed() -> None:
    nan = LintFinding(check="nan_scale", severity="error", message="bad \x00 <scale>")
    tasks = (_task("nvfp4", 60, 5, both=100), _task("requant", 30, 14, both=100), _task("direct", 0, 0))
    verdict = gate(POLICY, comparison=_comparison(*tasks), lint={"nvfp4": _lint(nan), "requant": _lint()})
    root = ElementTree.fromstring(to_junit(verdict))
    cases = root.findall("./testsuite/testcase")
    assert len(cases) == len(verdict.checks) == int(root.attrib["tests"])
    tags = {(case.attrib["classname"], case.attrib["name"]): [child.tag for child in case] for case in cases}
    assert tags["gate.nvfp4", "lint"] == ["error", "system-out"]
    assert tags["gate.requant", "lint"] == ["system-out"]
    assert tags["gate.nvfp4", "accuracy sums strict"] == ["failure", "system-out"]
    assert tags["gate.requant", "accuracy sums strict"] == ["error", "system-out"]
    assert tags["gate.direct", "accuracy sums strict"] == ["skipped", "system-out"]
    assert (root.attrib["failures"], root.attrib["errors"], root.attrib["skipped"]) == ("1", "2", "2")
    assert tags["gate.run", "evaluation strictly"] == ["skipped", "system-out"]  # its margin is of no task here
    assert "<scale>" in cases[0].find("error").attrib["message"]  # type: ignore[union-attr]
    properties = {p.attrib["name"]: p.attrib["value"] for p in root.findall(".//property")}
    assert properties["verdict"] == "invalid"
    assert properties["policy_note"] == "few items. Margin: 10 pp a task, 2 pp on strictly."


@pytest.mark.parametrize(("margin", "says"), [(35.0, "Margin: 35 pp a task."), ("none", "No answers are judged")])
def test_the_note_is_of_the_policy_as_it_was_applied(margin: Any, says: str) -> None:
    import yaml  # type: ignore[import-untyped]

    from workbench.composition import policy_file

    for name in ("smoke", "default", "release"):
        shipped = yaml.safe_load(policy_file(name).read_text())
        rows = [_row("a", 20.0, 20.0)]
        verdict = gate(
            {**shipped, "margin_pp": margin, "gated": ["nvfp4"]}, comparison=_comparison(_task("nvfp4", 2, 1)),
            tensors=rows,
        )  # fmt: skip
        assert says in verdict.policy_note
        assert (" pp" in verdict.policy_note) == (margin != "none")
        (found,) = verdict.attributions
        for text in (found.summary, *(layer.reason for layer in found.layers)):
            assert ("above the margin" in text) <= (margin != "none")


def test_what_was_not_measured_of_a_gated_arm_is_said() -> None:
    policy = {**POLICY, "gated": ["nvfp4"], "reported": []}
    answers = _comparison(_task("nvfp4", 0, 0, n=400, both=350))

    def weights(tensors: Any, **changes: Any) -> tuple[str, list[Any], str]:
        verdict = gate({**policy, **changes}, comparison=answers, tensors=tensors, lint={})
        return verdict.status, [check for check in verdict.checks if check.name == "weights"], verdict.headline

    status, (check,), headline = weights([])
    assert (status, check.status, check.arm) == ("pass", "reported", "nvfp4")
    assert "min_sqnr_db could not be applied" in check.reason
    assert "Weights were not measured: nvfp4." in headline
    others = [{**_row("a", 20.0, 20.0), "first_arm": "first", "second_arm": "second"}]
    status, (check,), _ = weights(others)
    assert (status, check.status) == ("inconclusive", "inconclusive")
    assert "(measured: first, second)" in check.reason
    status, (check,), _ = weights([], tiers={"default": "critical", "weights": "critical"})
    assert (status, check.status) == ("inconclusive", "inconclusive")
    status, (check,), headline = weights(others, tiers={"default": "critical", "weights": "supporting"})
    assert (status, check.status) == ("pass", "inconclusive")
    assert "Weights were not measured: nvfp4." in headline
    assert weights(others, weights=None)[:2] == ("pass", [])
    assert weights([_row("a", 20.0, 20.0)])[:2] == ("pass", [])
    (lint,) = [check for check in gate(policy, comparison=answers, lint={}).checks if check.name == "lint"]
    assert (lint.status, lint.arm) == ("reported", "nvfp4")


def test_a_direct_arm_is_judged_by_its_own_weights() -> None:
    policy = {**POLICY, "gated": ["direct"], "reported": [], "weights": {"min_sqnr_db": 15.0, "min_correlation": 0.99}}
    answers = _comparison(_task("direct", 2, 1))
    row = {**_row("a", 20.0, 16.0), "direct_arm": "direct", "second_format": "mxfp4", "power_source": 1.0}

    def judged(sqnr_db: float) -> Any:
        error = 10 ** (-sqnr_db / 10)
        figures = {"sqnr_direct_db": sqnr_db, "power_direct": error, "gain_direct": 1 - error}
        return gate(policy, comparison=answers, tensors=[row | figures], lint={})

    sound = judged(18.9)
    assert sound.status == "pass"
    assert {check.name for check in sound.checks if check.name.startswith("weights")} == {
        "weights sqnr",
        "weights correlation",
    }
    (check,) = _only(judged(9.0), "fail")[:1]
    assert (check.arm, check.name) == ("direct", "weights sqnr")
    (tensors,) = [layer for layer in judged(9.0).attributions[0].layers if layer.layer == "tensors"]
    assert tensors.status == "caught"
    without = gate(policy, comparison=answers, tensors=[{**row, "direct_arm": ""}], lint={})
    assert [check.status for check in without.checks if check.name == "weights"] == ["inconclusive"]
