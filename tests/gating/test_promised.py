"""What a run set out to measure and does not hold any more is no pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from test_unquantized import _digest, _server, _task

from workbench.gating import Promised, gate, read_promised
from workbench.records import Comparison, NumericsCard, Verdict

POLICY: dict[str, Any] = {"name": "smoke", "margin_pp": 10.0, "gated": ["nvfp4"], "weights": {"min_sqnr_db": 10.0}}
ROW = {
    "name": "m.weight", "first_arm": "nvfp4", "second_arm": "", "sqnr_first_db": 20.0, "sqnr_total_db": float("nan"),
    "corr_e1_w": -0.1, "projection": "gate_proj",
}  # fmt: skip
SETTINGS = {
    "arms": {"source": {}, "nvfp4": {}},
    "engine": {"kind": "vllm", "numerics": True},
    "eval": {"sums": {"task": "gsm8k"}},
    "analysis": {"pairs": [{"first": "nvfp4", "second": None}]},
}
STAGES = ("lint", "analyze", "evaluate", "compare")


def _card(**changes: Any) -> NumericsCard:
    whole = {"backend": "emulation", "engine_version": "0", "device": "cpu", "verdict": "runs as asked", "probed": 3}
    return NumericsCard(**{"arm": "nvfp4", "layers": 3, **whole, **changes})


def _judge(policy: dict[str, Any] | None = None, **changes: Any) -> Verdict:
    evidence: dict[str, Any] = {
        "comparison": Comparison(baseline="source", noise_arm="", tasks=(_task("nvfp4", 2, 1),)),
        "lint": {"source": _digest("a", "/source"), "nvfp4": _digest("b", "/nvfp4")},
        "tensors": [ROW],
        "numerics": {"nvfp4": _card()},
        "servers": {"nvfp4": _server("nvfp4", "emulation")},
        "promised": read_promised(SETTINGS, STAGES),
    }
    return gate(policy or POLICY, **{**evidence, **changes})


def test_whole_evidence_passes() -> None:
    assert _judge().status == "pass"


@pytest.mark.parametrize(
    ("change", "status", "name", "says"),
    [
        ({"lint": {}}, "invalid", "lint", "the reports are gone"),
        ({"tensors": []}, "inconclusive", "weights", "the run measured the weights of nvfp4"),
        ({"numerics": {}}, "inconclusive", "numerics", "there is none: evaluate it again"),
        ({"numerics": {"nvfp4": _card(probed=0)}}, "inconclusive", "numerics", "of no layer"),
        (
            {"lint": {"nvfp4": dataclasses.replace(_digest("b", "/nvfp4"), checks=(), tensors=0)}},
            "invalid", "lint", "its report is empty (0 tensors, 0 checks)",
        ),
        ({"lint": {"nvfp4": _digest("a", "/source")}}, "invalid", "lint", "is about /source, its server had /nvfp4"),
        (
            {"promised": read_promised({**SETTINGS, "eval": {"sums": {}, "mmlu_pro": {}}}, STAGES)},
            "invalid", "evaluation mmlu_pro", "the run's eval names mmlu_pro",
        ),
    ],
)  # fmt: skip
def test_what_is_gone_empty_or_anothers_is_no_pass(change: dict[str, Any], status: str, name: str, says: str) -> None:
    verdict = _judge(**change)
    assert verdict.status == status
    (check,) = [check for check in verdict.checks if check.name == name and says in check.reason]
    assert check.status == status


def test_a_run_that_never_set_out_to_measure_it_passes_as_before() -> None:
    verdict = _judge(promised=Promised(), tensors=[], numerics={}, lint={})
    assert verdict.status == "pass"
    assert "Weights were not measured: nvfp4." in verdict.headline


def test_tasks_that_the_policy_names() -> None:
    critical = {**POLICY, "margin_pp": {"default": 10.0, "mmlu_pro": 1.0}, "tiers": {"mmlu_pro": "critical"}}
    assert _judge(critical).status == "invalid"
    shown = _judge({**POLICY, "margin_pp": {"default": 10.0, "mmlu_pro": 1.0}, "tiers": {"aime": "advisory"}})
    assert shown.status == "pass"
    reported = {check.name for check in shown.checks if "which was not compared" in check.reason}
    assert reported == {"evaluation mmlu_pro", "evaluation aime"}
    named = {"default": "supporting", "sums": "critical", "weights": "critical"}
    assert _judge({**POLICY, "tiers": named}).status == "pass"


def test_a_group_is_its_subtasks_and_perplexity_is_not_paired() -> None:
    of_group = dataclasses.replace(_task("nvfp4", 2, 1), task="mmlu_pro_biology")
    settings = {**SETTINGS, "eval": {"mmlu_pro": {}, "wikitext": {"metric": "word_perplexity"}}}
    comparison = Comparison(baseline="source", noise_arm="", tasks=(of_group,))
    assert _judge(comparison=comparison, promised=read_promised(settings, STAGES)).status == "pass"
    assert _judge(comparison=comparison).status == "invalid"  # sums


@pytest.mark.parametrize("settings", [{}, {"arms": None, "engine": 3, "eval": [], "analysis": {"pairs": {}}}])
def test_settings_of_others_promise_nothing(settings: dict[str, Any]) -> None:
    assert read_promised(settings, STAGES) == Promised()


def test_stages_that_did_not_run_promise_nothing() -> None:
    assert read_promised(SETTINGS, ("prepare", "gate")) == Promised()
    assert read_promised({**SETTINGS, "engine": {"kind": "external", "numerics": True}}, STAGES).numerics == frozenset()
