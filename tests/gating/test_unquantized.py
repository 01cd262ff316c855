"""An arm whose checkpoint holds the baseline's own weights is told, and the verdict stays what the numbers say."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from workbench.gating import gate, to_junit, to_step_summary
from workbench.records import Comparison, LintReport, ServerRecord, TaskComparison, TensorEquality
from workbench.statistics import loss_interval

POLICY: dict[str, Any] = {"name": "smoke", "margin_pp": 10.0, "gated": ["nvfp4", "requant"]}


def _task(candidate: str, lost: int, gained: int) -> TaskComparison:
    n, both = 200, 150
    low, high = loss_interval(lost, gained, n)
    return TaskComparison(
        task="sums", filter="strict", metric="exact_match", baseline="source", candidate=candidate, n=n, both=both,
        lost=lost, gained=gained, neither=n - both - lost - gained, baseline_value=(both + lost) / n,
        candidate_value=(both + gained) / n, loss_pp=100 * (lost - gained) / n, loss_low_pp=low, loss_high_pp=high,
        loss_upper95_pp=high, p_loss=0.5, p_two_sided=1.0, recovery_percent=100.0, recovery_low_percent=90.0,
        recovery_high_percent=110.0, discordance=(lost + gained) / n, mde_pp=3.0, primary=True,
    )  # fmt: skip


def _good() -> Comparison:
    return Comparison(baseline="source", noise_arm="", tasks=(_task("nvfp4", 2, 1), _task("requant", 3, 2)))


def _server(arm: str, backend: str) -> ServerRecord:
    return ServerRecord(
        arm=arm, engine="vllm", base_url="", model="m", checkpoint=f"/{arm}", backend=backend, weight_format="bf16",
        activation_format="bf16", activation_scale="none", kv_cache_dtype="auto", dtype="bfloat16",
    )  # fmt: skip


def _digest(weights: str, folder: str) -> LintReport:
    return LintReport(
        checkpoint=folder, dialect="plain", checks=("nan-values",), findings=(), quantized_tensors=0, tensors=2,
        seconds=0.1, weights=weights,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("equality", "folder", "says"),
    [
        ({}, "/copy", "with the same name, type and shape, and the same bytes where both were sampled: nothing was"),
        ({"nvfp4": TensorEquality(arm="nvfp4", compared=3)}, "/copy", "are byte for byte those of source: nothing was"),
        ({}, "/source", "are byte for byte those of source: nothing was quantized"),  # the very folder
    ],
)
def test_an_arm_that_is_the_baseline_under_another_name_is_told(
    equality: dict[str, TensorEquality], folder: str, says: str
) -> None:
    lint = {"source": _digest("a", "/source"), "nvfp4": _digest("a", folder), "requant": _digest("b", "/requant")}
    verdict = gate(POLICY, comparison=_good(), lint=lint, equality=equality)
    plain = gate(POLICY, comparison=_good(), lint={**lint, "nvfp4": _digest("c", "/copy")}, equality=equality)
    assert verdict.status == plain.status == "pass"  # the numbers say what they say
    (check,) = [check for check in verdict.checks if check.name == "weights unquantized"]
    assert (check.arm, check.status) == ("nvfp4", "reported")
    assert says in check.reason
    told = " Nothing was quantized in nvfp4: the weights are those of source."
    assert verdict.headline == plain.headline + told
    assert [check for check in verdict.checks if check.name != "weights unquantized"] == list(plain.checks)
    assert told.strip() in to_step_summary(verdict)
    assert says in to_junit(verdict)


@pytest.mark.parametrize(
    "change",
    [
        {"roles": {"nvfp4": "noise"}},
        {"roles": {"nvfp4": "requant"}},  # converted as it is loaded
        {"servers": {"nvfp4": _server("nvfp4", "requant")}},
        {"comparison": dataclasses.replace(_good(), noise_arm="nvfp4")},
        {"comparison": dataclasses.replace(_good(), baseline="another")},
        {"lint": {"source": _digest("", "/s"), "nvfp4": _digest("", "/c")}},  # linted before digests were taken
        {"lint": {"source": _digest("a", "/s"), "nvfp4": _digest("b", "/c")}},
        {"equality": {"nvfp4": TensorEquality(arm="nvfp4", compared=3, differing=("x",))}},  # where none was sampled
    ],
)
def test_an_arm_with_the_baselines_weights_by_design_or_with_others_is_not_told(change: dict[str, Any]) -> None:
    evidence = {"comparison": _good(), "lint": {"source": _digest("a", "/s"), "nvfp4": _digest("a", "/c")}}
    told = gate(POLICY, **evidence)
    assert "weights unquantized" in {check.name for check in told.checks}
    verdict = gate(POLICY, **{**evidence, **change})
    assert "weights unquantized" not in {check.name for check in verdict.checks}
    assert "Nothing was quantized" not in verdict.headline


def test_what_was_served_tells_where_nothing_was_linted_and_the_run_where_nothing_was_compared() -> None:
    servers = {arm: dataclasses.replace(_server(arm, "emulation"), fingerprint="f") for arm in ("source", "nvfp4")}
    assert "Nothing was quantized in nvfp4" in gate(POLICY, comparison=_good(), servers=servers).headline
    servers["nvfp4"] = dataclasses.replace(servers["nvfp4"], fingerprint="g")
    assert "Nothing was quantized" not in gate(POLICY, comparison=_good(), servers=servers).headline
    lint = {"source": _digest("a", "/s"), "nvfp4": _digest("a", "/c")}
    roles = {"source": "baseline", "nvfp4": "emulation"}
    weights = {"name": "weights", "margin_pp": "none", "gated": ["nvfp4"]}
    verdict = gate(weights, comparison=None, lint=lint, roles=roles)
    assert verdict.headline.startswith("Pass: nvfp4 passes every check")
    assert verdict.headline.endswith("Nothing was quantized in nvfp4: the weights are those of source.")
