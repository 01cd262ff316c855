"""Limits on measured latencies: the interval decides, every load must hold, and what was not measured stays open."""

from __future__ import annotations

import dataclasses
import math

import pytest

from workbench.gating.policy import read_policy
from workbench.gating.serving import check_serving
from workbench.records import CostRatio, Evaluation, Latency, ServerRecord, ServingCost, ServingLoad

LOADS = (
    ServingLoad(input_tokens=8, output_tokens=4, concurrency=1, prompts=2),
    ServingLoad(input_tokens=8, output_tokens=4, concurrency=4, prompts=8),
)


def ratio(
    load: int, low: float, value: float, high: float, figure: str = "ttft_mean_ms", left_out: int = 0
) -> CostRatio:
    return CostRatio(
        arm="b", load=load, figure=figure, ratio=value, low=low, high=high, equal_low=low, equal_high=high, margin=0.01,
        repeats=10, left_out=left_out, verdict="inconclusive",
    )  # fmt: skip


def cost(*ratios: CostRatio, failed: int = 0) -> ServingCost:
    latencies = [
        Latency(
            arm=arm, load=load, repeats=10, completed=20, failed=failed,
            figures={"ttft_mean_ms": 50.0 * (1 + load), "output_tokens_per_s": 40.0},
        )
        for load in range(2)
        for arm in ("a", "b")
    ]  # fmt: skip
    return ServingCost(
        baseline="a", arms=("a", "b"), preset="own", loads=LOADS, repeats=10, together=True, date="", machine="",
        cores=1, system_load=(0.0, 0.0), engine_version="", starts=(), runs=(), latencies=tuple(latencies),
        ratios=ratios,
    )  # fmt: skip


def statuses(found: ServingCost | None, baseline: str = "a", **serving: dict[str, float]) -> list[tuple[str, str]]:
    rules = read_policy({"name": "p", "margin_pp": {"default": 1.0}, "gated": ["b"], "serving": serving})
    return [(check.name, check.status) for check in check_serving(rules, baseline, {}, {}, found)]


def test_a_ratios_interval_decides_for_every_load() -> None:
    limit = {"max_ratio": {"ttft_mean_ms": 1.01}}
    name = "serving ttft_mean_ms ratio"
    good, open_, bad = ratio(0, 0.99, 1.0, 1.005), ratio(1, 1.0, 1.01, 1.02), ratio(1, 1.02, 1.03, 1.04)
    assert statuses(cost(good, open_), **limit) == [(name, "pass"), (name, "inconclusive")]
    assert statuses(cost(good, bad), **limit) == [(name, "pass"), (name, "fail")]
    assert statuses(cost(ratio(0, 0.99, 1.0, 1.005, left_out=1)), **limit) == [(name, "inconclusive")]
    assert statuses(cost(ratio(0, math.nan, 1.0, math.nan)), **limit) == [(name, "inconclusive")]


def test_seconds_a_token_are_the_throughputs_inverse() -> None:
    slower = ratio(0, 0.79, 0.80, 0.81, "output_tokens_per_s")  # a fifth fewer tokens a second
    rules = {"max_ratio": {"s_per_output_token": 1.2}}
    assert statuses(cost(slower), **rules) == [("serving s_per_output_token ratio", "fail")]
    assert statuses(cost(slower), max_ratio={"s_per_output_token": 1.3}) == [
        ("serving s_per_output_token ratio", "pass")
    ]


def test_an_amount_is_held_against_every_loads_median() -> None:
    found = cost()
    name = "serving ttft_mean_ms"
    assert statuses(found, max={"ttft_mean_ms": 75.0}) == [(name, "pass"), (name, "fail")]
    assert statuses(found, max={"s_per_output_token": 0.03}) == [("serving s_per_output_token", "pass")] * 2
    assert statuses(cost(failed=1), max={"ttft_mean_ms": 75.0}) == [(name, "inconclusive")] * 2


@pytest.mark.parametrize(("found", "baseline"), [(None, "a"), (cost(), "a"), (cost(ratio(0, 0.9, 0.9, 0.9)), "source")])
def test_what_was_not_measured_is_open(found: ServingCost | None, baseline: str) -> None:
    checked = statuses(found, baseline, max_ratio={"ttft_mean_ms": 1.01})
    assert checked == [("serving ttft_mean_ms ratio", "inconclusive")]


HOSTS = {"a": "http://x/v1", "b": "http://y/v1"}


def test_the_speed_of_servers_on_two_hosts_is_no_ratio() -> None:
    rules = read_policy(
        {
            "name": "p",
            "margin_pp": {"default": 1.0},
            "gated": ["b"],
            "serving": {"max_ratio": {"ttft_mean_ms": 1.01, "evaluation_s": 2.0}},
        }
    )
    servers = {
        arm: ServerRecord(
            arm=arm, engine="external", base_url=url, model="", checkpoint="", backend="", weight_format="",
            activation_format="", activation_scale="", kv_cache_dtype="", dtype="",
        )
        for arm, url in HOSTS.items()
    }  # fmt: skip
    evaluations = {
        arm: Evaluation(
            arm=arm, scores=(), command=(), harness="", request_order="forward", concurrency=1, seconds=seconds
        )
        for arm, seconds in (("a", 1.0), ("b", 9.0))
    }
    elsewhere = dataclasses.replace(cost(), urls=HOSTS)
    for check in check_serving(rules, "a", servers, evaluations, elsewhere):
        assert check.status == "inconclusive"
        assert "b and a are servers of others on two hosts, y and x" in check.reason
    one_host = {arm: dataclasses.replace(server, base_url=HOSTS["a"]) for arm, server in servers.items()}
    checks = check_serving(rules, "a", one_host, evaluations, cost(ratio(0, 0.99, 1.0, 1.005)))
    assert {(check.name, check.status) for check in checks} == {
        ("serving ttft_mean_ms ratio", "pass"),
        ("serving evaluation_s ratio", "fail"),
    }
