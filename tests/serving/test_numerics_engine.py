"""The numerics card of real engines: intact, with layers replaced inside the served model, and stock vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.serving.numerics import read_card
from workbench.serving.spec import ServeSpec

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def cards(engine):
    """Cards by job, and the plugin's own audit of the sabotaged server."""
    found = {
        key: read_card(ServeSpec(arm=key, checkpoint=job["checkpoint"], backend=job["backend"]), Path(job["facts"]))
        for key, job in engine.numerics.items()
    }
    return found, engine.audit("fallback")


def row_of(card, modules: str, layer: int):
    def covers(layers: str) -> bool:
        ends = [span.split("-") for span in layers.split(", ") if span]
        return any(int(span[0]) <= layer <= int(span[-1]) for span in ends)

    return next(row for row in card.rows if row.modules == modules and covers(row.layers))


def test_an_intact_arm_runs_as_asked_and_reads_as_a_short_table(cards):
    card = cards[0]["intact"]
    assert card.findings == ()
    assert card.as_asked
    assert card.verdict == "runs as asked: 23 layers"
    assert len(card.rows) == 13
    row = row_of(card, "model.layers.*.self_attn.o_proj", 1)
    assert (row.layers, row.count, row.method) == ("0-2", 3, "PackedLinearMethod")
    assert (row.weights, row.match, row.activation, row.activation_scale) == ("nvfp4", "exact", "nvfp4", "per token")
    absorbed = row_of(card, "model.layers.*.self_attn.kv_b_proj", 1)
    assert (absorbed.match, absorbed.activation, absorbed.method) == ("exact", "none", "UnquantizedLinearMethod")
    experts = row_of(card, "model.layers.*.mlp.experts.routed_experts", 1)
    assert (experts.weights, experts.match, experts.activation) == ("nvfp4", "fits", "nvfp4")
    assert experts.codes == "equal"
    assert {"0", "7"} <= set(experts.experts.split(", "))


def test_layers_replaced_inside_the_served_model_are_named(cards):
    card = cards[0]["fallback"]
    assert not card.as_asked
    assert card.verdict.startswith("3 of 23 layers do not run as asked")
    assert len(card.findings) == 3
    weight_only = row_of(card, "model.layers.*.self_attn.o_proj", 0)
    assert (weight_only.match, weight_only.activation) == ("exact", "none")
    assert "input asked in nvfp4, runs not rounded (weight-only)" in weight_only.finding
    other = row_of(card, "model.layers.*.mlp.down_proj", 0)
    assert (other.method, other.match) == ("UnquantizedLinearMethod", "differs")
    assert "its weights are none of the checkpoint's" in other.finding
    experts = row_of(card, "model.layers.*.mlp.experts.routed_experts", 1)
    assert (experts.match, experts.activation, experts.layers) == ("fits", "none", "1")
    assert row_of(card, "model.layers.*.mlp.experts.routed_experts", 2).finding == ""
    assert row_of(card, "model.layers.*.self_attn.o_proj", 1).finding == ""


def test_what_describes_itself_by_its_configuration_would_have_been_wrong(cards):
    # The plugin's audit is written at load, from the plan: it says NVFP4 of all three layers that the card names.
    said = cards[1]["layers"]
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert said[f"model.layers.0.{name}"]["activation"] == "nvfp4"
    assert said["model.layers.1.mlp.experts.routed_experts"]["activation"] == "nvfp4"


def test_stock_vllm_without_the_plugin_has_a_card_too(cards):
    card = cards[0]["stock"]
    assert card.as_asked, card.findings
    assert card.backend == "stock"
    assert card.verdict == "runs as asked: 23 layers"
    experts = row_of(card, "model.layers.*.mlp.experts.routed_experts", 1)
    assert (experts.method, experts.weights, experts.activation) == ("UnquantizedFusedMoEMethod", "bf16", "none")
    assert row_of(card, "model.layers.*.mlp.gate", 1).match == "exact"
