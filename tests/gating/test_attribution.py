"""Which of three made an arm lose: one case for each cause, the mixed ones, and what cannot be told."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from test_gate import _task

from workbench.formats import get_format
from workbench.formats.tensor import quantize
from workbench.gating import gate
from workbench.gating.layers import FORMAT_SQNR_DB, allowed_sqnr_db
from workbench.records import (
    ArtefactPanel,
    Attribution,
    Comparison,
    Evaluation,
    LintFinding,
    LintReport,
    LostAnswers,
    NumericsCard,
    Preflight,
    PreflightFinding,
    ServerRecord,
    TensorEquality,
    Transport,
    Verdict,
    from_json,
    to_json,
)

POLICY: dict[str, Any] = {
    "name": "p",
    "margin_pp": 2.0,
    "gated": ["nvfp4"],
    "weights": {"min_sqnr_db": 10.0},
    "evidence": {"max_empty_share": 0.05, "max_truncated_share": 0.1, "max_failed_share": 0.0},
}
LINT = LintReport(
    checkpoint="c", dialect="modelopt", checks=("x",), findings=(), quantized_tensors=9, tensors=9, seconds=1
)
CARD = NumericsCard(arm="nvfp4", backend="emulation", engine_version="", device="cpu", verdict="runs as asked")
FATES = ("failed", "null", "unfinished", "cut_early", "cut", "odd_finish", "empty", "unextracted", "finished")


def lost(
    *, clean: tuple[int, int] | None = None, gained: int = 2, prompts_differ: int = 0, **fates: int
) -> LostAnswers:
    """n = 200. clean: (lost, gained) among the clean pairs, the finished ones where not given."""
    counts = dict.fromkeys(FATES, 0) | fates
    gone = sum(counts.values())
    whole = clean or (counts["finished"], gained)
    return LostAnswers(
        baseline="source", n=200, lost=gone, gained=gained, **counts, clean_n=200 - gone + counts["finished"],
        clean_lost=whole[0], clean_gained=whole[1], prompts_counted=200, prompts_differ=prompts_differ,
    )  # fmt: skip


def panel(arm: str, became: LostAnswers | None, **changes: Any) -> ArtefactPanel:
    nan = math.nan
    figures: dict[str, Any] = {
        "arm": arm, "task": "sums", "filter": "strict", "n": 200, "truncated": 0, "empty": 0, "null": 0, "failed": 0,
        "stopped": 0, "stop_leaks": 0, "disagreements": 0, "invalid": {}, "duplicates": 0, "think_leaks": 0,
        "unfinished": 0, "length_median_tokens": None, "length_max_tokens": None, "accuracy_all": nan,
        "accuracy_all_low": nan, "accuracy_all_high": nan, "finished": 200, "accuracy_finished": nan,
        "accuracy_finished_low": nan, "accuracy_finished_high": nan, "lost": became,
    }  # fmt: skip
    return ArtefactPanel(**{**figures, **changes})


def evaluation(arm: str, became: LostAnswers | None, *, failed: int = 0, **changes: Any) -> Evaluation:
    transport = Transport(
        requests=200, resumed=0, retries=0, failed=failed, faults={"timeout": failed} if failed else {}
    )
    return Evaluation(
        arm=arm, scores=(), command=(), harness="h", request_order="forward", concurrency=1, seconds=1.0,
        panels=(panel(arm, became, **changes),), transport=transport,
    )  # fmt: skip


def rows(*sqnr_db: float, format: str = "nvfp4") -> list[dict[str, Any]]:
    return [
        {"name": f"m.{i}.weight", "source_arm": "source", "first_arm": "nvfp4", "second_arm": "",
         "first_format": format, "second_format": "", "sqnr_first_db": value, "sqnr_total_db": math.nan,
         "gain_total": math.nan}
        for i, value in enumerate(sqnr_db)
    ]  # fmt: skip


def server(arm: str, **changes: Any) -> ServerRecord:
    figures: dict[str, Any] = {
        "arm": arm, "engine": "vllm", "base_url": "u", "model": "m", "checkpoint": "c", "backend": "reference",
        "weight_format": "bf16", "activation_format": "none", "activation_scale": "none", "kv_cache_dtype": "auto",
        "dtype": "bfloat16", "fingerprint": "f",
    }  # fmt: skip
    return ServerRecord(**{**figures, **changes})


def attribution(became: LostAnswers | None, *, gone: int = 40, gained: int = 2, **evidence: Any) -> Attribution:
    """Of one arm that lost `gone` of 200 items, with sound weights and numerics unless `evidence` says otherwise."""
    noise = evidence.pop("noise", None)
    tasks = [_task("nvfp4", gone, gained, both=150 - gone, mde_pp=math.nan)]
    tasks += [_task("again", *noise, both=100)] if noise else []
    comparison = Comparison(baseline="source", noise_arm="again" if noise else "", tasks=tuple(tasks))
    changes = evidence.pop("panel", {})
    settings: dict[str, Any] = {
        "comparison": comparison,
        "lint": {"nvfp4": LINT},
        "tensors": rows(20.4, 20.7, 21.0),
        "numerics": {"nvfp4": CARD},
        "evaluations": {"source": evaluation("source", None), "nvfp4": evaluation("nvfp4", became, **changes)},
        **evidence,
    }
    verdict = gate(POLICY, **settings)
    assert from_json(Verdict, to_json(verdict)).attributions == verdict.attributions
    (found,) = verdict.attributions
    return found


def status(found: Attribution, layer: str) -> list[str]:
    return [finding.status for finding in found.layers if finding.layer == layer]


# ---- the weights


def test_whole_answers_that_are_wrong_from_sound_weights_are_rounding() -> None:
    found = attribution(lost(finished=40))
    assert (found.cause, found.caught_by, found.would_tell) == ("quantization", ("answers",), ())
    assert "one of rounding" in found.summary


@pytest.mark.parametrize(
    ("evidence", "layer"),
    [
        ({"tensors": rows(20.4, 9.8)}, "tensors"),
        ({"tensors": rows(20.4, 17.0)}, "tensors"),  # above the policy's 10 dB, below what NVFP4 allows
        ({"tensors": rows(20.4, math.nan)}, "tensors"),
        ({"equality": {"nvfp4": TensorEquality(arm="nvfp4", compared=5, differing=("lm_head.weight",))}}, "bytes"),
    ],
)
def test_a_fault_in_the_weights_explains_whatever_they_write(evidence: dict[str, Any], layer: str) -> None:
    found = attribution(lost(cut=20, empty=10, finished=10), **evidence)
    assert found.cause == "quantization"
    assert set(found.caught_by) == {layer, "artefacts", "answers"}
    assert "a fault in the quantized weights" in found.summary


def test_a_lint_error_is_a_fault_of_the_checkpoint_unless_the_policy_allows_it() -> None:
    error = LintFinding(check="scale-nan", severity="error", message="NaN", tensor="m.3")
    report = dataclasses.replace(LINT, findings=(error,))
    found = attribution(lost(finished=40), lint={"nvfp4": report})
    assert (found.cause, found.caught_by) == ("quantization", ("lint", "answers"))
    alone = gate(POLICY, comparison=None, lint={"nvfp4": report}).attributions[0]  # the run stopped there
    assert (alone.cause, alone.caught_by) == ("quantization", ("lint",))
    assert "no loss is established, but a fault was seen" in alone.summary
    allowed = gate({**POLICY, "lint": {"allow": ["scale-nan"]}}, comparison=None, lint={"nvfp4": report})
    assert allowed.attributions[0].cause == "none"


# ---- the harness


@pytest.mark.parametrize("fate", ["cut", "unfinished", "unextracted"])
def test_a_loss_that_is_gone_among_clean_pairs_is_the_harness(fate: str) -> None:
    found = attribution(lost(**{fate: 37, "finished": 3}))
    assert (found.cause, found.caught_by) == ("harness", ("artefacts", "answers"))
    assert "37 of 40 lost answers" in found.summary


def test_cut_answers_of_weights_that_nobody_measured_decide_nothing() -> None:
    found = attribution(lost(cut=37, finished=3), tensors=None)
    assert (found.cause, found.causes) == ("undecided", ())
    assert any("lint and analyze" in question for question in found.would_tell)
    assert attribution(lost(unextracted=37, finished=3), tensors=None).cause == "harness"  # the right answer is there


def test_a_warning_of_the_arm_alone_is_the_harness_and_a_shared_one_is_not() -> None:
    warning = PreflightFinding(id="bare-prompts", level="warning", message="no template")
    record = Preflight(
        arm="nvfp4", endpoint="e", api="completions", model="m", harness="h", max_length=9, server_max_length=None,
        server={}, tasks=(), findings=(warning,),
    )  # fmt: skip
    clean = dataclasses.replace(record, arm="source", findings=())
    found = attribution(lost(cut=38, finished=2), preflights={"nvfp4": record, "source": clean})
    assert (found.cause, status(found, "preflight")) == ("harness", ["caught"])
    found = attribution(lost(finished=40), preflights={"nvfp4": record, "source": record})
    assert (found.cause, status(found, "preflight")) == ("quantization", ["warned"])


# ---- the serving path


@pytest.mark.parametrize("fate", ["failed", "null", "cut_early", "odd_finish", "empty"])
def test_what_sound_weights_do_not_do_is_the_serving_path(fate: str) -> None:
    found = attribution(lost(**{fate: 38, "finished": 2}))
    assert (found.cause, found.caught_by) == ("serving path", ("artefacts", "answers"))


@pytest.mark.parametrize("measured", [True, False])
def test_another_chat_template_is_the_serving_path(measured: bool) -> None:
    evidence = {} if measured else {"tensors": None, "lint": {}}
    found = attribution(lost(finished=40, prompts_differ=200), **evidence)
    assert (found.cause, found.caught_by) == ("serving path", ("transport", "answers"))
    assert "another chat template or tokenizer" in found.summary


def test_other_numerics_than_asked_are_the_serving_path() -> None:
    card = dataclasses.replace(CARD, findings=("48 layers run weight-only",), verdict="not as asked")
    found = attribution(lost(finished=40), numerics={"nvfp4": card})
    assert (found.cause, found.caught_by) == ("serving path", ("numerics", "answers"))


def test_requests_that_were_never_answered_and_ignored_stops_are_the_serving_path() -> None:
    found = attribution(lost(failed=38, finished=2), panel={"failed": 38})
    assert (found.cause, status(found, "transport")) == ("serving path", ["caught"])
    found = attribution(lost(finished=2, unextracted=0, cut=38), panel={"stop_leaks": 60})
    assert found.causes == ("harness", "serving path")


def test_the_baselines_own_weights_that_answer_otherwise_are_the_serving_path() -> None:
    servers = {"source": server("source"), "nvfp4": server("nvfp4")}
    found = attribution(lost(finished=40), tensors=None, servers=servers)
    assert found.cause == "serving path"
    servers["nvfp4"] = server("nvfp4", fingerprint="g", backend="emulation", layers={"m": {"weight": "nvfp4"}})
    assert attribution(lost(finished=40), servers=servers, numerics={}).cause == "quantization"


def test_an_aa_arm_that_differs_from_itself_is_the_serving_path() -> None:
    found = attribution(lost(finished=40), noise=(30, 2))
    assert (found.cause, status(found, "noise")) == ("serving path", ["caught"])
    assert status(attribution(lost(finished=40), noise=(6, 5)), "noise") == ["clean"]


# ---- several, none, and what cannot be told


def test_a_loss_that_remains_beside_an_artefact_is_mixed() -> None:
    found = attribution(lost(cut_early=20, finished=20))
    assert (found.cause, found.causes) == ("mixed", ("quantization", "serving path"))
    found = attribution(lost(cut=20, finished=20))
    assert (found.cause, found.causes) == ("mixed", ("quantization", "harness"))
    found = attribution(lost(null=20, cut=10, finished=10), tensors=rows(20.4, -2.0))
    assert found.causes == ("quantization", "serving path")  # cut answers follow from the weights, null ones do not
    found = attribution(lost(null=20, cut=19, finished=1))
    assert found.causes == ("harness", "serving path")


def test_what_was_not_looked_at_is_asked_for() -> None:
    """Two folders of lm-eval's, as `compare A B` judges them: a loss, and nothing else."""
    comparison = Comparison(baseline="source", noise_arm="", tasks=(_task("nvfp4", 40, 2, both=110, mde_pp=math.nan),))
    (found,) = gate(POLICY, comparison=comparison).attributions
    assert (found.cause, found.caught_by, len(found.would_tell)) == ("undecided", ("answers",), 3)
    found = attribution(lost(finished=40), numerics={})
    assert found.cause == "undecided"
    assert found.would_tell[0].startswith("a numerics card")
    found = attribution(lost(cut=1, finished=39, clean=(3, 2)))
    assert (found.cause, len(found.would_tell)) == ("undecided", 1)


def test_no_loss_and_no_fault_has_no_cause() -> None:
    found = attribution(lost(finished=3), gone=3)
    assert (found.cause, found.caught_by, found.causes) == ("none", (), ())


def test_one_odd_answer_is_no_cause() -> None:
    found = attribution(lost(null=1, cut=1, finished=38))
    assert found.cause == "quantization"


def test_policies_limits_count_where_nobody_kept_the_baselines_requests() -> None:
    found = attribution(None, panel={"truncated": 60})
    assert (found.cause, status(found, "artefacts")) == ("harness", ["caught"])
    assert attribution(None).cause == "undecided"


# ---- what a format allows


@pytest.mark.parametrize("name", FORMAT_SQNR_DB)
def test_what_a_format_allows_is_what_it_was_measured_to_give(name: str) -> None:
    """The lowest of two distributions, two phases and the rules that round worst; bands for 131,072 weights."""
    generator = torch.Generator().manual_seed(0)
    shape = (64, 2048)
    normal = torch.randn(shape, generator=generator)
    chi = torch.randn((5, *shape), generator=generator).square().mean(0)
    rules = {rule.value for rule in get_format(name).rules} & {"amax", "ceil", "floor"}
    found = []
    for w in (normal, normal / chi.sqrt()):
        for phase in (0.02, 0.02 * 2**0.5):
            for rule in rules:
                error = (quantize(phase * w, name, rule).dequantize() - phase * w).square().mean()
                found.append(10 * math.log10(float((phase * w).square().mean() / error)))
    assert FORMAT_SQNR_DB[name] - 0.3 < min(found) < FORMAT_SQNR_DB[name] + 0.5


def test_two_roundings_allow_the_sum_of_their_noise() -> None:
    assert allowed_sqnr_db("nvfp4", "") == pytest.approx(FORMAT_SQNR_DB["nvfp4"] - 3.0)
    assert allowed_sqnr_db("nvfp4", "nvfp4") == pytest.approx(FORMAT_SQNR_DB["nvfp4"] - 3.0 - 10 * math.log10(2))
    assert allowed_sqnr_db("dense", "mxfp4") == pytest.approx(FORMAT_SQNR_DB["mxfp4"] - 3.0)
    assert allowed_sqnr_db("dense", "") == math.inf
    assert math.isnan(allowed_sqnr_db("nvfp4", "int8_tensor"))
