"""Tiers, Holm, tensors, serving, thresholds, the committed baseline: each can turn a verdict, none by accident."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from test_gate import POLICY, _comparison, _evaluation, _evaluations, _good, _only, _row, _task

from workbench.errors import ConfigError, OutputError
from workbench.gating import (
    append_history,
    append_step_summary,
    gate,
    import_policy,
    is_foreign_policy,
    read_history,
    read_policy,
    to_junit,
    to_step_summary,
    trend_lines,
)
from workbench.records import Comparison, Evaluation, ServerRecord, TensorEquality

ONE = {"margin_pp": 1.0, "gated": ["nvfp4"]}


# ---- tiers -----------------------------------------------------------------------------------------------------------


def _tiers(status_of: dict[str, tuple[int, int, int]], tiers: dict[str, str]) -> Any:
    tasks = [_task("nvfp4", lost, gained, both=both, task=name) for name, (lost, gained, both) in status_of.items()]
    return gate({**POLICY, "gated": ["nvfp4"], "tiers": tiers}, comparison=_comparison(*tasks))


PASS, FAIL, OPEN = (2, 1, 150), (60, 5, 100), (30, 14, 100)


@pytest.mark.parametrize(
    ("second", "tier", "status"),
    [
        (OPEN, "critical", "inconclusive"),
        (OPEN, "supporting", "pass"),
        (OPEN, "advisory", "pass"),
        (FAIL, "critical", "regression"),
        (FAIL, "supporting", "regression"),
        (FAIL, "advisory", "pass"),
    ],
)
def test_tiers_weigh_a_check(second: tuple[int, int, int], tier: str, status: str) -> None:
    verdict = _tiers({"first": PASS, "second": second}, {"default": "critical", "second": tier})
    assert verdict.status == status
    check = next(c for c in verdict.checks if c.name == "accuracy second strict")
    assert check.tier == tier
    assert (check.status == "reported") == (tier == "advisory")
    if second is OPEN and tier == "supporting":
        assert "1 supporting checks are undecided" in verdict.headline
        assert "Needs about" in check.reason
        case = ElementTree.fromstring(to_junit(verdict)).findall(".//testcase")[verdict.checks.index(check)]
        assert [child.tag for child in case] == ["skipped", "system-out"]


def test_a_supporting_task_at_chance_does_not_make_a_run_invalid() -> None:
    guessing = (5, 5, 20)
    for tier, status in (("critical", "invalid"), ("supporting", "pass"), ("advisory", "pass")):
        assert _tiers({"first": PASS, "letters": guessing}, {"letters": tier}).status == status


def test_supporting_alone_is_no_pass() -> None:
    assert _tiers({"only": OPEN}, {"only": "supporting"}).status == "invalid"


# ---- Holm ------------------------------------------------------------------------------------------------------------


def test_holm_stands_between_several_tasks_and_a_false_alarm() -> None:
    lucky = _task("nvfp4", 14, 5, both=170, task="lucky")  # p = 0.032, loss 4.5 pp
    even = [_task("nvfp4", 5, 5, both=180, task=f"even{i}") for i in range(3)]
    policy = {**POLICY, "margin_pp": 1.0, "gated": ["nvfp4"]}
    assert gate(policy, comparison=_comparison(lucky)).status == "regression"
    assert gate({**policy, "correction": "none"}, comparison=_comparison(lucky, *even)).status == "regression"
    verdict = gate(policy, comparison=_comparison(lucky, *even))
    assert verdict.status == "inconclusive"
    check = next(c for c in verdict.checks if c.name == "accuracy lucky strict")
    assert "(0.13 over 4 tasks, Holm)" in check.reason
    assert "significant alone, but not as one of 4 tasks" in check.reason
    # an advisory task is no part of the family
    tiers = {f"even{i}": "advisory" for i in range(3)}
    assert gate({**policy, "tiers": tiers}, comparison=_comparison(lucky, *even)).status == "regression"


def test_metrics_of_one_filter_are_told_apart() -> None:
    tasks = [
        _task("nvfp4", 2, 1, metric="acc"),
        dataclasses.replace(_task("nvfp4", 60, 5, both=100), metric="acc_norm", primary=False),
    ]
    verdict = gate({**POLICY, "gated": ["nvfp4"]}, comparison=_comparison(*tasks))
    assert verdict.status == "pass"
    assert [c.name for c in verdict.checks] == ["accuracy sums strict acc", "accuracy sums strict acc_norm"]


# ---- tensors ---------------------------------------------------------------------------------------------------------


def _full(name: str, **changes: Any) -> dict[str, Any]:
    """w = 1, e1 and e2 of power 0.01 and 0.02, all uncorrelated."""
    figures = {"power_source": 1.0, "power_e1": 0.01, "corr_e1_w": 0.0, "power_total": 0.03, "gain_total": 1.0}
    return {**_row(name, 20.0, 15.2), **figures, "corr_e1_e2": 0.02, **changes}


def test_correlation_with_the_source() -> None:
    policy = {**POLICY, "weights": {"min_correlation": 0.98}}
    verdict = gate(policy, comparison=_good(), tensors=[_full("m")])
    found = {c.arm: c.value for c in verdict.checks if c.name == "weights correlation"}
    assert found == {"nvfp4": pytest.approx(1 / math.sqrt(1.01)), "requant": pytest.approx(1 / math.sqrt(1.03))}
    assert verdict.status == "pass"
    # half the source plus noise of power 0.25: <w, b> = 0.5, |b|^2 = 0.5
    bad = _full("half", gain_total=0.5, power_total=0.5)
    verdict = gate(policy, comparison=_good(), tensors=[_full("m"), bad])
    (check,) = _only(verdict, "fail")
    assert (check.arm, check.value) == ("requant", pytest.approx(0.5 / math.sqrt(0.5)))
    assert "half (0.7071)" in check.reason
    assert gate(policy, comparison=_good(), tensors=[_full("m", power_total=None)]).status == "regression"


def test_correlation_of_a_first_quantization_is_numpys() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    w = rng.normal(size=100_000)
    e = 0.2 * rng.normal(size=w.size) - 0.05 * w
    row = _full("m", power_source=(w**2).mean(), power_e1=(e**2).mean(), corr_e1_w=np.corrcoef(w, e)[0, 1])
    verdict = gate({**POLICY, "weights": {"min_correlation": 0.5}}, comparison=_good(), tensors=[row])
    found = next(c.value for c in verdict.checks if c.name == "weights correlation" and c.arm == "nvfp4")
    assert found == pytest.approx(np.corrcoef(w, w + e)[0, 1], abs=1e-5)


def test_correlated_errors() -> None:
    policy = {**POLICY, "weights": {"max_error_correlation": 0.1}}
    rows = [_full("a"), _full("b", corr_e1_e2=-0.15), _full("c", corr_e1_e2=math.nan)]
    (check,) = _only(gate(policy, comparison=_good(), tensors=rows), "fail")
    assert check.arm == "requant"
    assert "b (0.150)" in check.reason
    rows = [_full("a"), _full("c", corr_e1_e2=math.nan)]
    assert gate(policy, comparison=_good(), tensors=rows).status == "pass"


def test_unquantized_tensors_must_be_the_sources_bytes() -> None:
    policy = {**POLICY, "gated": ["nvfp4"], "weights": {"equal_bytes": True}}
    comparison = _comparison(_task("nvfp4", 2, 1))
    same = TensorEquality(arm="nvfp4", compared=7)
    assert gate(policy, comparison=comparison, equality={"nvfp4": same}).status == "pass"
    assert gate(policy, comparison=comparison).status == "invalid"
    other = dataclasses.replace(same, differing=("lm_head.weight",), missing=("norm.weight",))
    verdict = gate(policy, comparison=comparison, equality={"nvfp4": other})
    assert verdict.status == "regression"
    assert (
        "1 of 7 unquantized tensors differ from the source's, 1 are missing: lm_head.weight, norm.weight"
        in verdict.headline
    )


# ---- serving ---------------------------------------------------------------------------------------------------------


def _server(arm: str, **figures: Any) -> ServerRecord:
    return ServerRecord(
        arm=arm,
        engine="vllm",
        base_url="",
        model="m",
        checkpoint="c",
        backend="emulation",
        weight_format="nvfp4",
        activation_format="",
        activation_scale="none",
        kv_cache_dtype="auto",
        dtype="bfloat16",
        **figures,
    )


def test_serving_costs_are_limited_by_ratio_and_by_amount() -> None:
    policy = {**POLICY, "gated": ["nvfp4"], "serving": {"max_ratio": {"weight_bytes": 0.4}, "max": {"load_s": 60}}}
    comparison = _comparison(_task("nvfp4", 2, 1))
    servers = {"source": _server("source", weight_bytes=1000), "nvfp4": _server("nvfp4", weight_bytes=300, load_s=50.0)}
    assert gate(policy, comparison=comparison, servers=servers).status == "pass"
    heavy = {**servers, "nvfp4": _server("nvfp4", weight_bytes=500, load_s=50.0)}
    (check,) = _only(gate(policy, comparison=comparison, servers=heavy), "fail")
    assert (check.name, check.value, check.limit) == ("serving weight_bytes ratio", 0.5, 0.4)
    assert "no interval" in check.reason
    external = {**servers, "nvfp4": _server("nvfp4", weight_bytes=300)}
    assert gate(policy, comparison=comparison, servers=external).status == "inconclusive"
    lenient = {**policy, "tiers": {"serving": "supporting"}}
    assert gate(lenient, comparison=comparison, servers=external).status == "pass"
    assert gate(lenient, comparison=comparison, servers=heavy).status == "regression"
    with pytest.raises(ConfigError, match="unknown key 'load'"):
        read_policy({**policy, "serving": {"max": {"load": 3}}})


# ---- thresholds of other projects -----------------------------------------------------------------------------------

GSM8K = {"model_name": "org/model", "accuracy_threshold": 0.89, "num_questions": 1319, "num_fewshot": 5}
HARNESS = {
    "model_name": "org/model",
    "tasks": [
        {
            "name": "gsm8k",
            "metrics": [
                {"name": "exact_match,strict-match", "value": 0.755},
                {"name": "exact_match,flexible-extract", "value": 0.755},
            ],
        }
    ],
    "limit": 1000,
    "num_fewshot": 5,
}


def test_vllm_thresholds_become_a_policy_that_states_its_power() -> None:
    settings, warnings = import_policy(GSM8K, name="model")
    assert settings["thresholds"] == [{"task": "gsm8k", "filter": "", "metric": "", "value": 0.89, "tolerance": 0.08}]
    assert settings["evidence"] == {"min_items": 1319}
    assert "lost 5 pp in 99.8 % of runs" in warnings[0]
    assert "from 8.9 pp on" in warnings[0]
    settings, warnings = import_policy(HARNESS, name="model")
    assert [(t["metric"], t["filter"], t["tolerance"]) for t in settings["thresholds"]] == [
        ("exact_match", "strict-match", pytest.approx(0.0604)),
        ("exact_match", "flexible-extract", pytest.approx(0.0604)),
    ]
    assert "lost 5 pp in 76.7 % of runs" in warnings[0]
    assert read_policy({**settings, "gated": ["arm"]}).margin_pp == {}
    assert is_foreign_policy(GSM8K)
    assert is_foreign_policy(HARNESS)
    assert not is_foreign_policy(POLICY)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model_name": "m"}, "holds neither accuracy_threshold nor tasks"),
        ({"accuracy_threshold": 54}, "accuracy_threshold is 54"),
        ({**GSM8K, "num_questions": "all"}, "num_questions is 'all'"),
        ({"tasks": [{"name": "gsm8k"}]}, "no metrics"),
        ({"tasks": []}, "no metric has a value"),
        ({"tasks": [{"name": "g", "metrics": [{"name": "acc,none"}]}]}, "value of acc,none is None"),
        ({"tasks": [{"name": "g", "metrics": [3]}]}, "a metric of g is 3"),
        ({"tasks": [{"name": "g", "metrics": [None]}]}, "a metric of g is None"),
        ({**GSM8K, "num_questions": 10**400}, "num_questions is '1000"),
        ({**GSM8K, "margin_pp": 0.1, "gated": ["a"]}, "f holds margin_pp, gated, which is no key of vLLM's"),
        ({**HARNESS, "tiers": {}, "foo": 1}, "f holds tiers, foo, which is no key"),
        ({"accuracy_threshold": 0.05}, "0.05 less the tolerance of 0.08 is a limit of -3 %: every arm passes"),
        ({**GSM8K, "tolerance": 0.89}, "is a limit of 0 %"),
        ({**HARNESS, "rtol": 1.0}, "gsm8k strict-match exact_match: .* is a limit of 0 %"),
    ],
)
def test_files_that_are_not_vllms_are_refused(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        import_policy(content, name="f")


def _scored(right: int, n: int) -> dict[str, Evaluation]:
    evaluation = _evaluation("nvfp4")
    score = dataclasses.replace(evaluation.scores[0], task="gsm8k", n=n, value=right / n)
    return {"nvfp4": dataclasses.replace(evaluation, scores=(score,))}


@pytest.mark.parametrize(("acc", "acc_norm", "status"), [(0.6, 0.85, "pass"), (0.85, 0.3, "regression")])
def test_a_threshold_is_about_the_metric_that_it_names(acc: float, acc_norm: float, status: str) -> None:
    content = {**HARNESS, "tasks": [{"name": "sums", "metrics": [{"name": "acc_norm,none", "value": 0.8}]}]}
    settings, _ = import_policy(content, name="f")
    one = dataclasses.replace(_evaluation("nvfp4").scores[0], filter="none", n=1000, metric="acc", value=acc)
    other = dataclasses.replace(one, metric="acc_norm", value=acc_norm, primary=False)
    evaluation = dataclasses.replace(_evaluation("nvfp4"), scores=(one, other))
    policy = {**settings, "gated": ["nvfp4"]}
    assert gate(policy, comparison=None, evaluations={"nvfp4": evaluation}).status == status
    absent = dataclasses.replace(evaluation, scores=(one,))
    verdict = gate(policy, comparison=None, evaluations={"nvfp4": absent})
    assert "the arm has no result for sums none acc_norm" in verdict.headline
    both = dataclasses.replace(evaluation, scores=(dataclasses.replace(one, primary=False), other))
    unnamed = {**policy, "thresholds": [{"task": "sums", "filter": "none", "value": 0.8}]}
    verdict = gate(unnamed, comparison=None, evaluations={"nvfp4": both})
    assert "several results for sums none: none acc, none acc_norm; name the metric" in verdict.headline


def test_a_threshold_is_judged_by_bounds_of_the_accuracy() -> None:
    settings, _ = import_policy(GSM8K, name="model")
    settings["gated"] = ["nvfp4"]

    def status(right: int, n: int = 1319) -> str:
        return gate(settings, comparison=None, evaluations=_scored(right, n)).status

    # limit 81 %: 1,068.4 of 1,319; one-sided exact 95 % bounds reach about 1.8 points either way
    assert status(1100) == "pass"
    assert status(1075) == status(1060) == "inconclusive"  # above the limit and below it
    assert status(1040) == "regression"
    assert status(45, 50) == "invalid"  # a threshold of 1,319 questions says nothing of 50
    assert gate(settings, comparison=None, evaluations={}).status == "invalid"
    verdict = gate(settings, comparison=None, evaluations=_scored(1100, 1319))
    assert verdict.headline == "Pass: nvfp4 passes every check of the policy that could be applied."
    assert "truly lost 5 pp" in verdict.checks[0].reason


# ---- committed baseline, history, step summary -----------------------------------------------------------------------


def _since(*tasks: Any) -> Comparison:
    return Comparison(baseline="committed", noise_arm="", tasks=tasks)


def test_arms_are_judged_against_themselves_in_the_committed_baseline() -> None:
    policy = {**POLICY, "gated": ["nvfp4"]}
    comparison = _comparison(_task("nvfp4", 2, 1))
    same = _since(_task("nvfp4", 1, 1, baseline="committed"), _task("source", 0, 0, baseline="committed"))
    assert gate(policy, comparison=comparison, since=same).status == "pass"
    # what it lacks was not judged, and is no pass
    for stored in ((), same.tasks[:1], same.tasks[1:], (same.tasks[0], dataclasses.replace(same.tasks[1], task="x"))):
        assert gate(policy, comparison=comparison, since=_since(*stored)).status == "invalid"
    noted = dataclasses.replace(same, notes=("arm 'x' is not in the baseline",))
    verdict = gate(policy, comparison=comparison, since=noted)
    assert verdict.status == "pass"
    assert [c.reason for c in verdict.checks if c.name == "since baseline"] == ["arm 'x' is not in the baseline"]
    with pytest.raises(ConfigError, match="the committed baseline would judge nothing"):
        gate({**policy, "margin_pp": "none"}, comparison=comparison, since=same)
    moved = _since(_task("nvfp4", 1, 1, baseline="committed"), _task("source", 60, 5, both=100, baseline="committed"))
    verdict = gate(policy, comparison=comparison, since=moved)
    (check,) = _only(verdict, "fail")
    assert (check.arm, check.name) == ("source", "since baseline sums strict")
    assert verdict.exit_code == 1


def test_history_is_appended_and_its_trend_told(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "history.jsonl"
    assert read_history(path) == []
    for week, lost in enumerate((2, 3, 4, 5, 6)):
        comparison = _comparison(_task("nvfp4", lost, 1), _task("nvfp4", 9, 9, primary=False, filter="flexible"))
        verdict = gate({**POLICY, "gated": ["nvfp4"]}, comparison=comparison)
        before = path.read_bytes() if path.exists() else b""
        append_history(path, verdict, comparison, run=f"run{week}", when=f"2026-01-0{week + 1}T00:00:00+00:00")
        assert path.read_bytes().startswith(before)
        lines = trend_lines(read_history(path))
        assert len(lines) == 1
        assert ("too few for a trend" in lines[0]) == (week < 4)
    entries = read_history(path)
    assert [entry.run for entry in entries] == [f"run{week}" for week in range(5)]
    assert entries[0].figures[0].loss_pp == pytest.approx(0.5)
    assert "over 5 runs +0.500 pp a run (+0.500 to +0.500), p(not rising) = 0.0083" in lines[0]
    path.write_bytes(path.read_bytes().rstrip(b"\n"))  # an editor that leaves out the last newline
    append_history(path, verdict, comparison, run="run5", when="2026-01-06T00:00:00+00:00")
    assert [entry.run for entry in read_history(path)] == [f"run{week}" for week in range(6)]
    with path.open("a") as stream:
        stream.write('{"when": 1')
    before = path.read_bytes()
    with pytest.raises(OutputError, match=r"(?s)line 7 is no entry .*its end was never written.*delete this last line"):
        append_history(path, verdict, comparison, run="run6", when="w")
    assert path.read_bytes() == before
    with pytest.raises(OutputError, match="could not append"):
        append_history(tmp_path, verdict, None, run="r", when="w")


def test_step_summary_shows_the_worst_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = dataclasses.replace(
        _comparison(_task("nvfp4", 2, 1), _task("requant", 60, 5, both=100)), notes=("a <b> | c",)
    )
    verdict = gate(POLICY, comparison=comparison)
    text = to_step_summary(verdict, comparison, ["nvfp4 sums: rising"])
    rows = [line for line in text.splitlines() if line.startswith("| ❌") or line.startswith("| ✅")]
    assert "accuracy sums strict" in rows[0]
    assert rows[0].startswith("| ❌ fail | requant ")
    assert "| requant | sums strict | 80.0 % | 52.5 % | +27.50 (" in text
    assert "a &lt;b> \\| c" in text
    assert "nvfp4 sums: rising" in text
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    assert not append_step_summary(text)
    target = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(target))
    assert append_step_summary("one\n")
    assert append_step_summary("two\n")
    assert target.read_text() == "one\ntwo\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"correction": "bonferroni"}, "gate.correction='bonferroni'"),
        ({"tiers": {"sums": "vital"}}, "gate.tiers.sums='vital'"),
        ({"tiers": "critical"}, "gate.tiers='critical'"),
        ({"weights": {"equal_bytes": "yes"}}, "equal_bytes='yes'"),
        ({"weights": {"min_correlation": 2}}, "min_correlation=2"),
        ({"thresholds": [{"task": "t"}]}, "lacks a task or a value"),
        ({"thresholds": {"task": "t"}}, "gate.thresholds="),
        ({"evidence": {"max_failed_share": -1}}, "max_failed_share=-1"),
        ({"name": "x\nverdict: PASS"}, "gate.name="),
        ({"name": "???"}, r"gate.name='\?\?\?'"),
        ({"name": {"a": 1}}, "gate.name="),
        ({"gated": ["a\x1b[31m"]}, "gate.gated="),
        ({"thresholds": [{"task": "t", "value": 0.3, "tolerance": 0.3}]}, "is a limit of 0 %, which every arm passes"),
    ],
)
def test_new_keys_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_policy({**POLICY, **change})


def test_failed_requests_stand_in_the_way_of_a_pass() -> None:
    policy = {**POLICY, "evidence": {"max_failed_share": 0.0}}
    verdict = gate(policy, comparison=_good(), evaluations=_evaluations(requant={"failed": 1}))
    assert verdict.status == "inconclusive"
    assert "1 of 200 answers are failed" in verdict.headline


@pytest.mark.parametrize("name", ["default", "release", "smoke"])
def test_shipped_policies_are_understood(name: str) -> None:
    from importlib.resources import files

    from omegaconf import OmegaConf

    content = OmegaConf.to_container(OmegaConf.create((files("workbench.conf") / "gate" / f"{name}.yaml").read_text()))
    assert isinstance(content, dict)
    policy = read_policy({**{str(key): value for key, value in content.items()}, "gated": ["arm"]})
    assert policy.correction == "holm"
    if name == "default":
        assert (policy.margin("anything"), policy.tier("anything")) == (1.0, "critical")
